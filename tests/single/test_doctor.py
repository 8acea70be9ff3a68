"""The doctor's findings, from made-up facts; what its job's output becomes; and the probe on this machine."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar.config import DoctorSettings, make
from hvd_cifar.data.cifar import CIFAR10, CIFAR100
from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Card as NetworkCard
from hvd_cifar.launch.cluster.network import Network, NoWay
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.runtime import devices
from hvd_cifar.tools.doctor import ask, examine, findings, first_steps, job, plan, probe, table
from hvd_cifar.tools.doctor.facts import (
    GROUPS,
    Card,
    Cpu,
    Data,
    DataFile,
    Disk,
    FirstStep,
    Gpu,
    GpuOfRank,
    HorovodBuild,
    HostFacts,
    Job,
    Link,
    Memory,
    Names,
    Subject,
    Versions,
)
from hvd_cifar.tools.doctor.finding import Finding
from tests.ranks import CHECKOUT

HOSTS = ("a", "b", "c")
ADDRESS = {name: f"10.0.0.{number}" for number, name in enumerate(HOSTS, 1)}
CARDS = {name: NetworkCard("eth0", address, "10.0.0.0/24", 10_000) for name, address in ADDRESS.items()}
PACKAGES = {"tensorflow-cpu": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "horovod": "0.28.1", "rich": "14.0"}
GPU, OLD_GPU = Gpu(name="H200", driver="570.1"), Gpu(name="H200", driver="560.0")
GOOD_FILE = DataFile(bytes=CIFAR10.bytes_of("test_batch.bin"), sha256="1", wrong_label_at=-1)


def _healthy_host(name: str) -> HostFacts:
    return HostFacts(
        clock=(0.001, 0.002),
        network=Names(
            hostname=name,
            cards=(Card(name="eth0", address=ADDRESS[name], netmask="255.255.255.0", up=True, speed=10_000),),
            addresses={host: (address,) for host, address in ADDRESS.items()},
            names={address: host for host, address in ADDRESS.items()},
        ),
        cpu=Cpu(cores=8, quota=None, load=1.0, model="x", flags=("avx", "f16c", "fma", "avx512_bf16")),
        memory=Memory(available=2**35, shm_total=2**33, shm_free=2**33, attach_error="", open_files=1024),
        versions=Versions(
            python="3.11.7",
            packages=PACKAGES,
            mpi="mpirun (Open MPI) 4.1.8",
            horovod=HorovodBuild(tensorflow="2.21.0", features=("MPI", "Gloo")),
            code="abc",
        ),
        gpus=(),
        disk=Disk(folder="/runs", free=2**40, error="", temporary="/tmp", temporary_error=""),
        data=Data(folder="/data", files=dict.fromkeys(CIFAR10.files, GOOD_FILE)),
    )


def _link(a: str, b: str, speed: float = 1e9, late: float = 1e-4, wrong: int = 0) -> Link:
    ranks = (HOSTS.index(a), HOSTS.index(b) + 1)
    return Link(a=a, b=b, ranks=ranks, seconds=late, bytes_per_second=speed, wrong_values=wrong)


LINKS = (_link("a", "a", 5e9, 1e-6), _link("a", "b"), _link("a", "c"), _link("b", "c"))
HEALTHY = Subject(
    hosts=(Host("a", 2), Host("b", 1), Host("c", 1)),
    here="a",
    hosts_option="--hostfile my-cluster",
    dataset="auto",
    data_dir="/data",
    run_dir="/runs/x",
    facts={name: _healthy_host(name) for name in HOSTS},
    network=Network("10.0.0.0/24", CARDS),
    job=Job(ranks={"a": 2, "b": 1, "c": 1}, how="4 ranks", hosts=("a", "a", "b", "c"), links=LINKS, pairs=3),
)


def _with(subject: Subject, **changed: Any) -> Subject:
    return subject.model_copy(update=changed)


def _changed(host: str, group: str, /, subject: Subject = HEALTHY, **fields: Any) -> Subject:
    """A subject in which one host's facts of a group are others."""
    facts = subject.facts[host]
    new = getattr(facts, group).model_copy(update=fields)
    return _with(subject, facts={**subject.facts, host: facts.model_copy(update={group: new})})


def _told(host: str, group: str, value: Any, subject: Subject = HEALTHY) -> Subject:
    """A subject in which one host has other facts for a whole group."""
    return _with(subject, facts={**subject.facts, host: subject.facts[host].model_copy(update={group: value})})


def _gpu_cluster(count: int, slots: int) -> Subject:
    build = HorovodBuild(tensorflow="2.21.0", features=("MPI", "Gloo", "NCCL"))
    subject = _with(HEALTHY, hosts=tuple(Host(name, slots) for name in HOSTS))
    for name in HOSTS:
        subject = _changed(name, "versions", subject, horovod=build)
        subject = _told(name, "gpus", (GPU,) * count, subject)
    return subject


def _data(**files: DataFile | None) -> Data:
    kept = {**dict.fromkeys(CIFAR10.files, GOOD_FILE), **{f"{name}.bin": file for name, file in files.items()}}
    return Data(folder="/data", files={name: file for name, file in kept.items() if file})


def _names(host: str, **fields: Any) -> Subject:
    return _changed(host, "network", **fields)


def _knows(host: str, **addresses: str) -> Subject:
    return _names(host, addresses={name: (address,) for name, address in addresses.items()})


def _missing(host: str, group: str) -> Subject:
    facts = HEALTHY.facts[host].model_copy(update={group: None, "missing": {group: "no answer in time"}})
    return _with(HEALTHY, facts={**HEALTHY.facts, host: facts})


def _versions(host: str, **fields: Any) -> Subject:
    return _changed(host, "versions", **fields)


def _packages(**versions: str | None) -> dict[str, str]:
    return {name: version for name, version in (PACKAGES | versions).items() if version}


def _build(*features: str, tensorflow: str = "2.21.0") -> HorovodBuild:
    return HorovodBuild(tensorflow=tensorflow, features=features)


def _without_mpi() -> Subject:
    """One host, whose Horovod knows Gloo alone."""
    facts = {"b": _versions("b", horovod=_build("Gloo")).facts["b"]}
    return _with(HEALTHY, facts=facts, hosts=(Host("b", 1),), here="b", network=None, job=None, no_job="x")


def _cpu(host: str, **fields: Any) -> Subject:
    return _changed(host, "cpu", **fields)


def _memory(host: str, subject: Subject = HEALTHY, /, **fields: Any) -> Subject:
    return _changed(host, "memory", subject, **fields)


def _disk(host: str, **fields: Any) -> Subject:
    return _changed(host, "disk", **fields)


def _everywhere(group: str, **by_host: Any) -> Subject:
    return _with(HEALTHY, facts={n: f.model_copy(update={group: by_host[n]}) for n, f in HEALTHY.facts.items()})


def _file(**fields: Any) -> DataFile:
    return GOOD_FILE.model_copy(update=fields)


def _has(host: str, **files: DataFile | None) -> Subject:
    return _told(host, "data", _data(**files))


def _slots(**slots: int) -> Subject:
    return _with(HEALTHY, hosts=tuple(Host(host.name, slots.get(host.name, host.slots)) for host in HEALTHY.hosts))


def _job(**changed: Any) -> Subject:
    assert HEALTHY.job
    return _with(HEALTHY, job=HEALTHY.job.model_copy(update=changed))


def _blocked(*pairs: str) -> Subject:
    return _with(HEALTHY, blocked=tuple(NoWay(pair[0], pair[1], CARDS[pair[1]]) for pair in pairs))


DOWN = Card(name="ib0", address="10.9.0.2", netmask="255.255.255.0", up=False, speed=0)
UP = {
    name: Card(name="ib0", address=f"10.9.0.{n}", netmask="255.255.255.0", up=True, speed=0)
    for n, name in enumerate("ac")
}


def _ib_down() -> Subject:
    subject = HEALTHY
    for name, card in (("a", UP["a"]), ("b", DOWN), ("c", UP["c"])):
        there = subject.facts[name].network
        assert there
        subject = _changed(name, "network", subject, cards=(*there.cards, card))
    return subject


# By check: a subject, and of the finding on it the level and host, a part of its text, and one of its advice.
Case = tuple[Subject, str, str, str]
CASES: dict[str, list[Case]] = {
    "ssh": [
        (_with(HEALTHY, silent={"b": ("ssh b: no answer", "is it on?")}), "failure b", "no answer", "is it on"),
        (_missing("b", "gpus"), "warning b", "no facts about its gpus", "ssh b"),
    ],
    "names": [
        (
            _knows("b", a="10.0.0.1", c="10.0.0.3"),
            "warning b",
            "cannot resolve its own name, b",
            "echo '10.0.0.2 b' >> /etc/hosts",
        ),
        (_knows("b", a="10.0.0.1", b="10.0.0.2"), "warning b", "cannot resolve the name c", "echo '10.0.0.3 c'"),
        (
            _knows("b", a="10.0.0.1", b="10.0.0.2", c="10.5.5.5"),
            "warning b",
            "resolves c to 10.5.5.5, which is not an address of c",
            "10.0.0.3",
        ),
        (
            _names("b", names={"10.0.0.1": "c", "10.0.0.2": "b", "10.0.0.3": "c"}),
            "warning b",
            "resolves 10.0.0.1, an address of a, to the name c",
            "10.0.0.1",
        ),
    ],
    "network": [
        (_with(HEALTHY, network=None), "failure", "no network in common (a: eth0 10.0.0.0/24;", "connect"),
        (_ib_down(), "warning b", "ib0 (10.9.0.2) is down, but up on a, c", "ip link set ib0 up"),
    ],
    "ports": [
        (
            _blocked("ab", "ba", "cb", "bc"),
            "failure b",
            "ports are blocked between it and a, c: ssh works",
            "ufw allow from 10.0.0.0/24",
        ),
        (_blocked("ac"), "failure c", "ports are blocked between it and a", "ufw"),
        (
            _with(HEALTHY, blocked=(NoWay("a", "c", CARDS["c"], 1024),)),
            "failure c",
            "some ports (1024) are blocked between it and a",
            "ufw",
        ),
    ],
    "versions": [
        (
            _versions("b", packages=_packages(numpy="2.3.0")),
            "failure b",
            "numpy 2.3.0, not 2.4.6",
            "./run.sh setup --hostfile my-cluster",
        ),
        (_versions("b", packages=_packages(keras=None)), "failure b", "no keras", "setup"),
        (_versions("b", packages=_packages(rich="13.0")), "warning b", "rich 13.0, not 14.0", "setup"),
        (_versions("b", python="3.12.1"), "failure b", "Python 3.12.1, not 3.11.7", "setup"),
        (_versions("b", python="3.11.9"), "warning b", "3.11.9", "setup"),
        (_versions("b", mpi="mpirun (Open MPI) 5.0.1"), "failure b", "5.0.1, not mpirun (Open MPI) 4.1.8", ""),
        (_versions("b", mpi=""), "failure b", "no mpirun", ""),
        (_versions("c", code="def"), "failure c", "its files of this project differ", "update that checkout"),
        (_versions("c", code=""), "failure c", "this project is missing", "setup"),
    ],
    "Horovod": [
        (_versions("b", horovod=None), "failure b", "Horovod is missing", "setup"),
        (_without_mpi(), "failure b", "without MPI", "setup"),
        (
            _versions("b", horovod=_build("MPI", "Gloo", tensorflow="2.20.0")),
            "failure b",
            "for TensorFlow 2.20.0, but 2.21.0",
            "rm -r .venv",
        ),
        (
            _versions("b", horovod=_build("MPI", "Gloo", "NCCL")),
            "failure",
            "builds differ (a: MPI, Gloo; b: MPI, Gloo, NCCL",
            "setup",
        ),
    ],
    "cores": [
        (_slots(a=9), "warning a", "9 slots share 8 cores", "slots=8"),
        (_cpu("a", quota=1.5), "warning a", "2 slots share 1 core:", "slots=1"),
        (_cpu("c", flags=("f16c", "fma", "avx512_bf16")), "failure c", "lacks avx, which others have", "leave it out"),
        (_cpu("c", flags=("avx", "f16c", "fma")), "warning c", "no bfloat16 instructions on c", "--precision"),
    ],
    "GPUs": [
        (
            _with(_gpu_cluster(4, 4), hosts=(Host("a", 4), Host("b", 5), Host("c", 4))),
            "failure b",
            "5 slots, but 4 GPUs",
            "slots=4",
        ),
        (_told("b", "gpus", (GPU,)), "warning b", "1 GPU, but the environment is for the CPU", "--gpu"),
        (_told("c", "gpus", (), _gpu_cluster(4, 4)), "failure c", "no GPU on c, unlike on the others", "nvidia-smi"),
        (
            _told("c", "gpus", (OLD_GPU,) * 4, _gpu_cluster(4, 4)),
            "warning",
            "a: 570.1; b: 570.1; c: 560.0",
            "one driver",
        ),
        (_gpu_cluster(0, 1), "warning", "the environment is for GPUs, but nvidia-smi lists none", "load the driver"),
    ],
    "shared memory": [
        (
            _memory("a", shm_free=65536),
            "warning a",
            "64.0 KiB free in /dev/shm, but 2 ranks need 8.0 MiB",
            "--shm-size=1g",
        ),
        (_memory("a", _gpu_cluster(4, 4), shm_free=2**25), "failure a", "NCCL would fail", "--shm-size"),
        (
            _memory("a", attach_error="Operation not permitted"),
            "warning a",
            "'Read -1, expected'",
            "--cap-add=SYS_PTRACE",
        ),
    ],
    "memory": [
        (_memory("b", available=800 * 2**20), "warning b", "800 MiB free for each of 1 rank", "fewer slots"),
        (_memory("a", available=2**30), "failure a", "512 MiB free for each of 2 ranks", "fewer slots"),
    ],
    "open files": [
        (_memory("b", open_files=256), "warning b", "may open 256 files", "nofile"),
        (_memory("b", open_files=511), "warning b", "may open 511 files", "nofile"),
        (_memory("b", open_files=80), "warning b", "may open 80 files", "nofile"),
        (_memory("b", open_files=79), "failure b", "a rank of 4 needs about 80", "limits.d"),
    ],
    "run folder": [
        (_disk("a", free=2**20), "failure a", "1.0 MiB free in /runs", "--run-dir"),
        (_disk("a", free=2**29), "warning a", "512 MiB free", "--run-dir"),
        (_disk("a", error="Read-only file system"), "failure a", "cannot write to /runs: Read-only", "--run-dir"),
    ],
    "disk": [
        (_disk("c", temporary_error="No space left"), "failure c", "/tmp: No space left", "TMPDIR"),
    ],
    "clocks": [
        (_told("b", "clock", (-3600.0, 0.1)), "warning b", "3,600 s behind", "timedatectl"),
        (_everywhere("clock", a=(0.0, 0.1), b=(60.0, 0.1), c=(60.0, 0.1)), "warning a", "60.0 s behind", "timedatectl"),
    ],
    "data": [
        (
            _everywhere("data", a=None, b=None, c=None),
            "warning a",
            "has no CIFAR-10 in /data",
            "--data-dir",
        ),
        (_has("a", data_batch_3=None), "failure a", "data_batch_3.bin is missing", "restore it"),
        (_has("b", data_batch_3=_file(bytes=5)), "failure b", "has 5 bytes instead", "rank 0 sends it again"),
        (_has("b", test_batch=_file(wrong_label_at=7)), "failure b", "record 7 has no valid label", "sends it again"),
        (
            _has("b", test_batch=_file(sha256="2")),
            "failure b",
            "test_batch.bin differs from that of a",
            "--data-source rank0",
        ),
    ],
    "job": [
        (_with(HEALTHY, job=None, no_job="no host is left"), "warning", "not started: no host is left", ""),
        (_job(failure="ImportError: x"), "failure", "ImportError: x", "train --max-steps 1"),
        (
            _job(failure="no end within 5 s", pending=(("b", "c"),)),
            "failure",
            "it hung between b and c",
            "ports through between b and c",
        ),
        (_job(complaints=("Read -1, expected 5234, errno = 1",)), "warning", "Read -1, expected 5234", "SYS_PTRACE"),
        (_job(wrong_values=3), "failure", "3 wrong values in an all-reduce over all ranks", ""),
    ],
    "links": [
        (
            _job(links=(*LINKS[:3], _link("b", "c", wrong=4))),
            "failure",
            "4 wrong values in an all-reduce between b and c",
            "ethtool",
        ),
        (
            _job(links=(*LINKS[:3], _link("b", "c", 100000000.0))),
            "warning",
            "the link between b and c is slow: 800.0 Mbit/s, 100 us; the others' median is 8.0 Gbit/s",
            "ethtool -S eth0",
        ),
        (
            _job(links=(*LINKS[:2], _link("a", "c", 1200000.0), _link("b", "c", 1300000.0))),
            "warning c",
            "all its links are slow: 9.6 Mbit/s to 10.4 Mbit/s",
            "ethtool -S eth0 on c",
        ),
        (
            _job(links=(*LINKS[:3], _link("b", "c", late=0.02))),
            "warning",
            "20 ms; the others' median is 100",
            "ethtool",
        ),
        (
            _job(links=tuple((_link(x, y, 100000000.0) for x, y in ("ab", "ac", "bc")))),
            "warning",
            "; the cards have 10.0 Gbit/s",
            "ethtool",
        ),
        (  # among links that are all slow
            _job(links=(_link("a", "b", 5e7), _link("a", "c", 1e6), _link("b", "c", 1.1e6))),
            "warning c",
            "all its links are slow: 8.0 Mbit/s to 8.8 Mbit/s, 100 us; the others: 400.0 Mbit/s",
            "ethtool -S eth0 on c",
        ),
        (
            _with(_cpu("b", load=20.0), job=_job(links=(*LINKS[:3], _link("b", "c", 1e8))).job),
            "warning",
            "busy cores slow it (load 20 on b's 8 cores)",
            "ethtool",
        ),
    ],
}


def _wrong(subject: Subject) -> list[Finding]:
    return [finding for finding in findings.of(subject) if finding.level != "ok"]


@pytest.mark.parametrize(
    ("check", "case"),
    [pytest.param(check, case, id=case[2]) for check, cases in CASES.items() for case in cases],
)
def test_each_fault_is_named_with_host_and_advice(check: str, case: Case) -> None:
    subject, where, text, remedy = case
    found = [f for f in _wrong(subject) if f.check == check]
    assert found and f"{found[0].level} {found[0].host}".strip() == where
    assert text in found[0].text and remedy in found[0].remedy, found[0]
    assert all("\n" not in f.text + f.remedy for f in found)
    # Other checks see no fault in it, but for those that follow from it.
    others = {f.check for f in _wrong(subject)} - {check}
    assert others <= {"job", "links", "Horovod"}, others


def test_nothing_is_wrong_with_healthy_hosts() -> None:
    assert _wrong(HEALTHY) == []
    assert [f.check for f in findings.of(HEALTHY)] == [
        "ssh", "names", "network", "ports", "versions", "Horovod", "cores", "GPUs", "shared memory", "memory",
        "open files", "run folder", "clocks", "data", "job", "links",
    ]  # fmt: skip
    assert table.summary(findings.of(HEALTHY)) == "All is well."


@pytest.mark.parametrize(("chosen", "counts"), [(None, "222"), ("1", "122"), ("", "000"), ("-1", "000"), ("7", "022")])
def test_cuda_visible_devices_counts_as_for_the_launcher(
    chosen: str | None, counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = "GPU 0: H200 (UUID: GPU-a)\nGPU 1: H200 (UUID: GPU-b)\n"
    monkeypatch.setattr(devices, "list_gpus", lambda: listing)
    environment = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    seen = examine.as_ranks_see(_gpu_cluster(2, 2).facts, "a", environment)
    assert "".join(str(len(seen[name].gpus or ())) for name in HOSTS) == counts


def test_the_doctor_names_the_chosen_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "list_gpus", lambda: "GPU 0: A (UUID: GPU-a)\nGPU 1: B (UUID: GPU-b)\n")
    facts = {"a": HostFacts(gpus=tuple(Gpu(name=name, driver="550") for name in "AB"))}
    (seen,) = examine.as_ranks_see(facts, "a", {"CUDA_VISIBLE_DEVICES": "1"})["a"].gpus or ()
    assert seen.name == "B"


def test_what_harms_nobody_is_no_fault() -> None:
    alone = _with(
        HEALTHY, hosts=(Host("a", 2),), facts={"a": HEALTHY.facts["a"]}, network=None, job=Job(ranks={"a": 2}, how="x")
    )
    attach: dict[str, Any] = {"attach_error": "Operation not permitted"}
    shm: dict[str, Any] = {"shm_free": 65536, **attach}
    for fine in (
        alone,
        _changed("b", "memory", **shm),  # one rank shares no memory
        _with(_changed("a", "memory", **attach), single_copy_off=True),
        _told("b", "data", None),  # rank 0 sends it
        _changed("b", "disk", error="Read-only file system", free=0),  # rank 0 writes the run
        _names("b", names={}),  # no names for addresses: none is needed
        _with(_gpu_cluster(0, 1), hides_gpus=True),
        _changed("b", "memory", open_files=-1),
        _with(_told("a", "data", None), dataset="synthetic"),
        _with(_told("a", "data", None), dataset="folder:/data/birds"),
        _with(_told("a", "data", None), dataset="/home/me/sets.py:load"),
    ):
        assert _wrong(fine) == [], _wrong(fine)


def test_another_set_has_other_files() -> None:
    cifar100 = _with(HEALTHY, dataset="cifar100")  # whose folder holds CIFAR-10's files
    assert {f.text for f in _wrong(cifar100)} == {"/data/train.bin is missing or not readable"}
    files = {n: GOOD_FILE.model_copy(update={"bytes": CIFAR100.bytes_of(n)}) for n in CIFAR100.files}
    for host in "abc":
        cifar100 = _told(host, "data", Data(folder="/data", files=files), cifar100)
    assert _wrong(cifar100) == []


def test_the_job_leaves_out_hosts_that_cannot_take_part() -> None:
    def left(subject: Subject) -> list[str]:
        return [host.name for host in findings.hosts_for_the_job(subject)]

    assert left(HEALTHY) == ["a", "b", "c"]
    assert left(_blocked("ab", "ba", "cb", "bc")) == ["a", "c"]
    assert left(_blocked("bc", "cb")) == ["a", "b"]
    assert left(_with(_blocked("ab", "ac"), here="a")) == ["a"]
    assert left(_changed("b", "versions", code="other")) == ["a", "c"]
    assert left(_with(HEALTHY, facts={n: HEALTHY.facts[n] for n in "ac"})) == ["a", "c"]
    assert left(_changed("b", "memory", open_files=64)) == ["a", "c"]
    assert left(_changed("b", "memory", open_files=256)) == ["a", "b", "c"]  # a warning
    assert left(_changed("a", "disk", error="Read-only file system")) == ["a", "b", "c"]
    assert left(_told("b", "data", _data(test_batch=None))) == ["a", "b", "c"]


@given(st.lists(st.integers(1, 3), min_size=1, max_size=40), st.booleans())
def test_every_two_hosts_meet_once_and_nobody_twice_at_a_time(per_host: list[int], by_mpi: bool) -> None:
    rounds = plan.rounds(per_host, by_mpi)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) and pairs
    first = plan.leaders(per_host)
    between = [pair for pairs in rounds for pair in pairs if pair[0] in first and pair[1] in first]
    between = [(a, b) for a, b in between if first.index(a) != first.index(b)]
    assert len(between) == len(set(between)) and all(a < b for a, b in between)
    n = len(per_host)
    if by_mpi or n <= plan.ALL_PAIRS_OVER_HOROVOD:
        assert len(between) == n * (n - 1) // 2
        assert len(rounds) <= n + 1
    else:
        assert {rank for pair in between for rank in pair} == set(first)
        assert len(rounds) <= 3 * n.bit_length() + 1
    assert sum(b - a == 1 and a in first and b not in first for pairs in rounds for a, b in pairs) == sum(
        count > 1 for count in per_host
    )


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_every_two_gpus_of_a_host_meet_once(per_host: list[int]) -> None:
    rounds = plan.rounds(per_host, by_mpi=True, on_gpus=True)
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(ranks) == len(set(ranks)) and pairs
    within, first = [], plan.leaders(per_host)
    for begin, count in zip(first, per_host, strict=True):
        within += [(a, b) for b in range(begin, begin + count) for a in range(begin, b)]
    between = [(a, b) for b in first for a in first if a < b]
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted([*within, *between])
    assert len(rounds) <= max(per_host) + len(per_host)


STEPS = tuple(
    FirstStep(preset="fast", precision=name, rank=1, difference=0.01) for name in ("float32", "mixed_float16")
)
GPUS = tuple(
    GpuOfRank(name="H200", capability="9.0", peak=2**30, uuid=f"GPU-{number}", used=2**32) for number in (0, 1, 0, 0)
)


@pytest.mark.parametrize(
    ("changed", "level", "host", "text"),
    [
        ({}, "ok", "", "2 training steps match the CPU's; nearest to its limit: fast in float32 (0.01 of 0.1)"),
        (
            {"first_steps": (STEPS[0].model_copy(update={"difference": 0.5}), STEPS[1])},
            "failure",
            "a",
            "fast in float32: rank 1's training step differs from the CPU's by 0.5, more than 0.1",
        ),
        ({"gpus": (GPUS[0], *GPUS[:3])}, "failure", "a", "the driver shows rank 0 on GPU-0"),
        ({"gpus": (*GPUS[:2], GPUS[2].model_copy(update={"uuid": "GPU-2+GPU-3"}), GPUS[3])}, "failure", "b", "rank 2"),
        (
            {"gpus": (*GPUS[:3], GPUS[3].model_copy(update={"used": 2**36}))},
            "warning",
            "c",
            "rank 3 holds 64.0 GiB of its GPU for 1.0 GiB of tensors",
        ),
        ({"gpus": tuple(gpu.model_copy(update={"uuid": "", "used": 0}) for gpu in GPUS)}, "ok", "", "2 training steps"),
    ],
)
def test_first_steps_and_gpus_of_ranks(changed: dict[str, Any], level: str, host: str, text: str) -> None:
    done = _job(**{"first_steps": STEPS, "gpus": GPUS, **changed})
    found = [f for f in findings.of(done) if f.check == "first steps"]
    told = [f for f in found if f.level == level and f.host == host]
    assert told and text in told[0].text, found
    assert (level == "ok") == all(f.level == "ok" for f in found)


@pytest.mark.parametrize(
    ("loss", "update", "expected"),
    [(2.0, [3, 4], 0), (2.2, [3, 4], 0.1), (2.0, [3, 5], 0.2), (math.nan, [3, 4], 1e3), (2.0, [3, math.nan], 1e3)],
)
def test_how_far_a_step_is_from_the_right_one(loss: float, update: list[float], expected: float) -> None:
    right = (2.0, np.array([3.0, 4.0]))
    assert first_steps.difference((loss, np.array(update)), right) == pytest.approx(expected)


def test_where_the_driver_sees_a_process() -> None:
    listing = "12, GPU-a, 513\n7, GPU-b, 100\n12, GPU-c, [N/A]\n"
    assert first_steps.of_process(listing, 12) == ("GPU-a+GPU-c", 513 * 2**20)
    assert first_steps.of_process(listing, 1) == first_steps.of_process("", 12) == ("", 0)


OF_TWO = [Host("a", 2), Host("b", 1)]
SAID = f"noise\n{job.RESULT}" + json.dumps(
    {
        "how": "3 ranks",
        "hosts": ["a", "a", "b"],
        "wrong_values": 0,
        "through": "MPI",
        "links": [[0, 1, 1e-6, 5e9, 0], [0, 2, 1e-4, 1e9, 0]],
    }
)


def test_what_a_job_said_becomes_links_of_hosts() -> None:
    done = job.result_of(OF_TWO, 0, SAID, "hvd_cifar: note: 3 ranks share\n", None)
    assert (done.failure, done.how, done.complaints) == ("", "3 ranks", ())
    assert [(link.a, link.b, link.ranks) for link in done.links] == [("a", "a", (0, 1)), ("a", "b", (0, 2))]
    assert done.pairs == 1


IMPORT = "rank 1 on a: Traceback\nrank 1 on a: ImportError: no libmpi\n"
HANGS = f"rank 0 on a: {job.BEGINS} 0 2\nrank 2 on b: {job.BEGINS} 0 2\nrank 2 on b: {job.ENDS} 0 2\n"
ENDED = f"{job.BEGINS} 0 1\n{job.ENDS} 0 1\n"


@pytest.mark.parametrize(
    ("code", "output", "errors", "late", "failure", "pending"),
    [
        (1, "", IMPORT, None, "rank 1 on a: ImportError: no libmpi", ()),
        (2, "", "hvd_cifar: b cannot reach a\n", None, "b cannot reach a", ()),
        (0, "", "", None, "it ended with exit code 0 and said nothing", ()),
        (143, "", HANGS, 5.0, "no end within 5 s", (("a", "b"),)),
        (143, "", ENDED, 5.0, "no end within 5 s", ()),
    ],
)
def test_why_a_job_failed(
    code: int, output: str, errors: str, late: float | None, failure: str, pending: tuple[tuple[str, str], ...]
) -> None:
    done = job.result_of(OF_TWO, code, output, errors, late)
    assert (done.failure, done.pending) == (failure, pending)


def test_the_jobs_command() -> None:
    words = job.command(OF_TWO, unnamed=False, ring=True, on_gpus=False)
    assert words == ["--allreduce", "ring", "-np", "3", "-H", "a:2,b:1", "doctor-job", "--per-host", "2,1"]
    alone = job.command([Host("localhost", 2)], unnamed=True, ring=False, on_gpus=True)
    assert alone == ["-np", "2", "doctor-job", "--per-host", "2", "--on-gpus"]


def test_hosts_and_their_slots(tmp_path: Path) -> None:
    def hosts(**given: Any) -> list[tuple[str, int]]:
        return [(host.name, host.slots) for host in examine.hosts_of(make(DoctorSettings, given))]

    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2\n")
    assert hosts(hostfile=file) == [("a", 2), ("b", 2)]
    assert hosts(hostfile=file, ranks=3) == [("a", 2), ("b", 1)]
    assert hosts(hosts="a:2,b:2", ranks=2) == [("a", 2)]
    assert hosts(ranks=3) == [("localhost", 3)]
    nodes = (Host("n1", 2), Host("n2", 2))  # of a Slurm job
    assert examine.hosts_of(make(DoctorSettings, {}), nodes) == nodes
    assert examine.hosts_of(make(DoctorSettings, {"hosts": "a:2"}), nodes) == (Host("a", 2),)
    with pytest.raises(UserError, match="-np 5 is more than the 4 slots"):
        hosts(hosts="a:2,b:2", ranks=5)


def test_named_hosts_need_no_list_of_slurms() -> None:
    """Nothing lists the nodes here; -np is wrong, so that no job starts."""
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1"}
    words = [sys.executable, "-m", "hvd_cifar", "doctor", "-np", "2"]
    for hosts, told in (([], "scontrol does not list"), (["-H", "localhost:1"], "-np 2 is more than the 1 slots")):
        done = subprocess.run([*words, *hosts], cwd=CHECKOUT, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and told in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits(width: int) -> None:
    broken = _changed("b", "versions", packages={**PACKAGES, "numpy": "2.3.0"})
    text = table.of(broken, findings.of(broken), width, colour=False)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith("versions"))
    assert row.split()[:3] == ["versions", "FAIL", "b"] and "numpy 2.3.0, not 2.4.6" in row
    assert "-> ./run.sh setup --hostfile my-cluster" in text
    assert lines[-1] == "A run would fail: 1 failure."
    assert [line.split()[:2] for line in lines if "Gbit/s" in line and line[0] in "abc" and "right" in line][1:] == [
        ["a", "b"],
        ["a", "c"],
        ["b", "c"],
    ]


def test_json_holds_all_of_it() -> None:
    said = json.loads(table.as_json(HEALTHY, findings.of(HEALTHY)))
    assert said["would_fail"] is False
    assert said["job"]["how"] == "4 ranks" and len(said["job"]["links"]) == 4
    assert said["facts"]["b"]["versions"]["packages"]["numpy"] == "2.4.6"
    assert said["network"] == {"subnet": "10.0.0.0/24", "cards": {"a": "eth0", "b": "eth0", "c": "eth0"}}


def test_a_silent_host_is_promised_no_data() -> None:
    subject = HEALTHY.model_copy(
        update={"facts": {h: f for h, f in HEALTHY.facts.items() if h != "c"}, "silent": {"c": ("no answer", "")}}
    )
    (said,) = [finding.text for finding in findings.of(subject) if finding.check == "data"]
    assert said.startswith("complete in /data") and "c" not in said.partition(";")[2]


QUESTIONS = {
    "hosts": ["localhost"],
    "quota_files": devices.QUOTA_FILES,
    "data_files": ["x.bin"],
    "record_bytes": CIFAR10.record_bytes,
    "label_bytes": 1,
    "classes": 10,
}


def _ask(tmp_path: Path, python: str = sys.executable, **more: Any) -> HostFacts:
    folders = {"package": str(tmp_path), "run_dir": str(tmp_path / "not" / "yet"), "data_folders": [str(tmp_path)]}
    answers = ask.ask_all(Participants(["here"], "here", python), {**QUESTIONS, **folders, **more}, 60)
    assert not answers.silent
    return answers.facts["here"]


def test_the_last_label_byte_is_the_label(tmp_path: Path) -> None:
    block = bytearray(3 * CIFAR100.record_bytes)
    block[0], block[CIFAR100.record_bytes * 2 + 1] = 19, 100
    (tmp_path / "x.bin").write_bytes(block)
    found = _ask(tmp_path, record_bytes=CIFAR100.record_bytes, label_bytes=2, classes=100)
    assert found.data and found.data.files["x.bin"].wrong_label_at == 2


def test_this_machine_tells_its_facts(tmp_path: Path) -> None:
    block = bytearray(2 * CIFAR10.record_bytes)
    block[CIFAR10.record_bytes] = 10
    (tmp_path / "x.bin").write_bytes(block)
    found = _ask(tmp_path)
    assert not found.missing
    assert found.cpu and found.cpu.cores > 0 and found.memory and found.memory.available > 0
    assert found.versions and found.versions.packages["psutil"] and found.versions.horovod
    assert {"MPI", "Gloo"} <= set(found.versions.horovod.features)
    assert "Open MPI" in found.versions.mpi
    assert found.disk and (found.disk.folder, found.disk.error) == (str(tmp_path), "")
    assert found.data and found.data.files["x.bin"].wrong_label_at == 1
    assert found.data.files["x.bin"].bytes == 2 * CIFAR10.record_bytes
    assert found.clock and abs(found.clock[0]) <= found.clock[1] + 1e-3


# As containers do: the kernel answers process_vm_readv with EPERM, for all that is started from here.
FORBIDDING = """#!{python} -I
import ctypes, os, struct, sys
number = {{"x86_64": 310, "aarch64": 270}}[os.uname().machine]
load, equal, give = 0x20, 0x15, 0x06  # BPF: load the system call's number, compare, return
filters = [(load, 0, 0, 0), (equal, 0, 1, number), (give, 0, 0, 0x00050000 | 1), (give, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *f) for f in filters))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(filters), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which only root may
assert libc.prctl(22, 2, program, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv({python!r}, [{python!r}, *sys.argv[1:]])
"""


def test_memory_that_cannot_be_read_is_seen(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(FORBIDDING.format(python=sys.executable))
    python.chmod(0o755)
    memory = _ask(tmp_path).memory
    assert memory and memory.attach_error == ""
    memory = _ask(tmp_path, python=str(python)).memory
    assert memory and memory.attach_error == "Operation not permitted"


@pytest.mark.parametrize("folder", ["", "memory/", "job/", "memory/old/"])
def test_files_that_are_kept_in_memory_are_free(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of the outermost control group or of an inner one, as cgroup v1 and v2 tell it.

    Most of it is used by files that were read.
    """
    names = ("memory.max", "memory.current", "memory.stat")
    if folder.startswith("memory"):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    kept = "inactive_file 4000\nactive_file 2000\n"
    if folder.startswith("memory"):
        kept = "inactive_file 10\nactive_file 0\ntotal_inactive_file 4000\ntotal_active_file 2000\n"
    texts = ("9000\n", "8000\n", f"anon 500\n{kept}")
    files = {f"/sys/fs/cgroup/{folder}{name}": text for name, text in zip(names, texts, strict=True)}
    files["/proc/self/cgroup"] = "3:cpu,memory:/old\n0::/job/step\n"
    monkeypatch.setattr(probe, "_read", lambda path: files.get(path, ""))
    assert probe.memory({})["available"] == 7000


def test_the_limit_of_open_files_is_the_one_that_holds(tmp_path: Path) -> None:
    """The soft one, which a process meets; not the hard one, up to which it could be raised."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nulimit -S -n 97\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    memory = _ask(tmp_path, python=str(python)).memory
    assert memory and memory.open_files == 97


def test_a_group_that_fails_costs_no_other(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"1")
    found = _ask(tmp_path, record_bytes=0)  # divides by it
    assert set(found.missing) == {"data"} and "ZeroDivisionError" in found.missing["data"]
    assert found.disk is not None


def test_a_host_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the middle of its facts: the facts before count, and the group that hangs is named."""
    hung, hangs = tmp_path / "probe.py", tmp_path / "hangs"
    start = "def memory(asked: Asked) -> Any:\n"
    text = ask.PROBE.read_text()
    assert start in text
    hung.write_text(text.replace(start, f"{start}    open({str(hangs)!r}, 'w').close(); time.sleep(600)\n"))
    monkeypatch.setattr(ask, "PROBE", hung)

    def time_is_up_when_it_hangs(_: float, stop: Callable[[], None]) -> threading.Thread:
        def wait() -> None:
            while not hangs.exists():
                time.sleep(0.05)
            stop()

        return timer(0, wait)

    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", time_is_up_when_it_hangs)
    questions = {**QUESTIONS, "package": str(tmp_path), "run_dir": "/", "data_folders": []}
    facts = ask.ask_all(Participants(["here"], "here", sys.executable), questions, 8).facts
    assert facts["here"].missing == dict.fromkeys(GROUPS[GROUPS.index("memory") :], "no answer in time")
    assert facts["here"].cpu is not None


def test_the_probe_ends_with_whoever_asks(tmp_path: Path) -> None:
    text = ask.PROBE.read_text().replace(
        "def network(asked: Asked) -> Any:\n", "def network(asked: Asked) -> Any:\n    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-I", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin and process.stdout
    process.stdout.readline()
    process.stdin.write(json.dumps(QUESTIONS).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["group"] == "clock"
    process.stdin.close()
    assert process.wait(60) == 0
