"""The doctor's checks, on made-up facts, and what its job's output becomes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar.config import make
from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Card, Network, NoWay
from hvd_cifar.tools.doctor import checks, command, job, ranks
from hvd_cifar.tools.doctor.facts import (
    Cpu,
    Disk,
    Gpus,
    HostFacts,
    Job,
    Link,
    Memory,
    Subject,
    Versions,
)
from hvd_cifar.tools.doctor.finding import Finding
from hvd_cifar.tools.settings import DoctorSettings
from tests.ranks import CHECKOUT

HOSTS = ("a", "b", "c")
CARDS = {name: Card("eth0", f"10.0.0.{number}", "10.0.0.0/24", 10_000) for number, name in enumerate(HOSTS, 1)}
PACKAGES = {"tensorflow-cpu": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "horovod": "0.28.1", "rich": "14.0"}
FACTS = HostFacts(
    cpu=Cpu(cores=8, quota=None),
    memory=Memory(available=2**35, shm_free=2**33, open_files=1024),
    versions=Versions(python="3.11.7", packages=PACKAGES, mpi="mpirun (Open MPI) 4.1.8", code="abc"),
    gpus=Gpus(listing="", driver=""),
    disk=Disk(folder="/runs", free=2**40, error="", temporary="/tmp", temporary_error=""),
)


def _link(a: str, b: str, speed: float = 1e9, late: float = 1e-4, wrong: int = 0) -> Link:
    return Link(a=a, b=b, ranks=(0, 1), seconds=late, bytes_per_second=speed, wrong_values=wrong)


LINKS = (_link("a", "a", 5e9, 1e-6), _link("a", "b"), _link("a", "c"), _link("b", "c"))
JOB = Job(ranks={"a": 2, "b": 1, "c": 1}, how="4 ranks", hosts=("a", "a", "b", "c"), links=LINKS, pairs=3)
HEALTHY = Subject(
    hosts=(Host("a", 2), Host("b", 1), Host("c", 1)),
    here="a",
    facts=dict.fromkeys(HOSTS, FACTS),
    cards={name: (card,) for name, card in CARDS.items()},
    network=Network("10.0.0.0/24", CARDS),
    job=JOB,
)
NVIDIA = {"nvidia-nccl-cu12": "2.27"}


def _with(subject: Subject = HEALTHY, **changed: Any) -> Subject:
    return subject.model_copy(update=changed)


def _on(host: str, group: str, subject: Subject = HEALTHY, **fields: Any) -> Subject:
    """A subject in which one host's facts of a group are others."""
    facts = subject.facts[host]
    new = getattr(facts, group).model_copy(update=fields)
    return _with(subject, facts={**subject.facts, host: facts.model_copy(update={group: new})})


def _missing(host: str, group: str) -> Subject:
    facts = FACTS.model_copy(update={group: None, "missing": {group: "no answer in time"}})
    return _with(facts={**HEALTHY.facts, host: facts})


def _gpus(*counts: int, slots: int = 4, **drivers: str) -> Subject:
    """Hosts with numbers of GPUs, and an environment for them."""
    subject = _with(hosts=tuple(Host(name, slots) for name in HOSTS))
    for name, count in zip(HOSTS, counts, strict=True):
        subject = _on(name, "versions", subject, packages=PACKAGES | NVIDIA)
        listing = "".join(f"GPU {number}: H200 (UUID: GPU-{number})\n" for number in range(count))
        subject = _on(name, "gpus", subject, listing=listing, driver=drivers.get(name, "570.1"))
    return subject


def _job(**changed: Any) -> Subject:
    return _with(job=JOB.model_copy(update=changed))


def _blocked(*pairs: str, port: int | None = None) -> Subject:
    return _with(blocked=tuple(NoWay(pair[0], pair[1], CARDS[pair[1]], port) for pair in pairs))


SLOW = _link("b", "c", 1e8)

# By check: a subject, and of the first finding on it the level and host, a part of its text, and one of its advice.
CASES: dict[str, list[tuple[Subject, str, str, str]]] = {
    "ssh": [
        (_with(silent={"b": ("ssh b: no answer", "is it on?")}), "failure b", "no answer", "is it on"),
        (_missing("b", "gpus"), "warning b", "no facts about its gpus: no answer in time", "ssh b"),
    ],
    "network": [(_with(network=None), "failure", "no network in common (a: eth0 10.0.0.0/24;", "connect")],
    "ports": [
        (_blocked("ab", "ba", "cb", "bc"), "failure b", "ports are blocked between it and a, c at 10.0.0.2", "ufw all"),
        (_blocked("ac"), "failure c", "ports are blocked between it and a at 10.0.0.3", "ufw allow from 10.0.0.0/24"),
        (_blocked("ac", port=1024), "failure c", "some ports (1024) are blocked between it and a", "ufw"),
    ],
    "versions": [
        (_on("b", "versions", packages=PACKAGES | {"numpy": "2.3"}), "failure b", "numpy 2.3, not 2.4.6", "FILE"),
        (_on("b", "versions", packages={"rich": "14.0"}), "failure b", "no tensorflow-cpu, no keras", "setup"),
        (_on("b", "versions", packages=PACKAGES | {"rich": "13"}), "warning b", "rich 13, not 14.0", "setup"),
        (_on("b", "versions", python="3.12.1"), "failure b", "Python 3.12.1, not 3.11.7", "setup"),
        (_on("b", "versions", python="3.11.9"), "warning b", "Python 3.11.9, not 3.11.7", "setup"),
        (_on("b", "versions", mpi="mpirun (Open MPI) 5.0.1"), "failure b", "5.0.1, not mpirun (Open MPI) 4.1.8", ""),
        (_on("b", "versions", mpi=""), "failure b", "no mpirun", ""),
        (_on("c", "versions", code="def"), "failure c", "its files of this project differ", "update that checkout"),
        (_on("c", "versions", code=""), "failure c", "this project is missing", "setup"),
    ],
    "cores": [
        (_with(hosts=(Host("a", 9),)), "warning a", "9 slots share 8 cores", "slots=8"),
        (_on("a", "cpu", quota=1.5), "warning a", "2 slots share 1 core:", "slots=1"),
    ],
    "GPUs": [
        (_gpus(4, 3, 4), "failure b", "4 slots, but 3 GPUs", "slots=3"),
        (_on("b", "versions", _gpus(4, 1, 4), packages=PACKAGES), "warning b", "1 GPU, but the env", "FILE --gpu"),
        (_gpus(4, 4, 0), "failure c", "nvidia-smi lists no GPU", "nvidia-smi"),
        (_gpus(4, 4, 4, c="560.0"), "warning", "a: 570.1; b: 570.1; c: 560.0", "one driver"),
        (_gpus(0, 0, 0, slots=1), "warning", "the environment is for GPUs, but nvidia-smi lists none", "load the"),
        (_with(_gpus(4, 4, 4), chosen_gpus="1"), "failure a", "4 slots, but 1 GPU", "slots=1"),
    ],
    "shared memory": [
        (_on("a", "memory", shm_free=65536), "warning a", "64.0 KiB free in /dev/shm, but 2 ranks need 8.0 MiB", "1g"),
        (_on("a", "memory", _gpus(4, 4, 4), shm_free=2**25), "failure a", "NCCL would fail", "--shm-size"),
    ],
    "memory": [
        (_on("b", "memory", available=800 * 2**20), "warning b", "800 MiB free for each of 1 rank;", "fewer slots"),
        (_on("a", "memory", available=2**30), "failure a", "512 MiB free for each of 2 ranks", "fewer slots"),
    ],
    "open files": [
        (_on("b", "memory", open_files=511), "warning b", "may open 511 files", "nofile"),
        (_on("b", "memory", open_files=80), "warning b", "may open 80 files", "nofile"),
        (_on("b", "memory", open_files=79), "failure b", "a rank of 4 needs about 80", "limits.d"),
    ],
    "disk": [(_on("c", "disk", temporary_error="No space left"), "failure c", "/tmp: No space left", "TMPDIR")],
    "run folder": [
        (_on("a", "disk", free=2**20), "failure a", "1.0 MiB free in /runs", "--run-dir"),
        (_on("a", "disk", free=2**29), "warning a", "512 MiB free", "--run-dir"),
        (_on("a", "disk", error="Read-only file system"), "failure a", "cannot write to /runs: Read-only", "--run-dir"),
    ],
    "job": [
        (_with(job=None, no_job="no host is left"), "warning", "not started: no host is left", ""),
        (_job(failure="ImportError: x"), "failure", "ImportError: x", "train --max-steps 1"),
        (_job(failure="no end", pending=(("b", "c"),)), "failure", "it hung between b and c", "ports through between"),
        (_job(complaints=("Read -1, expected 5234, errno = 1",)), "warning", "Read -1, expected 5234", "SYS_PTRACE"),
        (_job(wrong_values=3), "failure", "3 wrong values in an all-reduce over all ranks", "setup"),
        (_job(ranks={"a": 2, "b": 1}), "warning", "it ran without c", ""),
    ],
    "links": [
        (_job(links=(*LINKS[:3], _link("b", "c", wrong=4))), "failure", "4 wrong values in an all-reduce", "ethtool"),
        (_job(links=(*LINKS[:3], SLOW)), "warning b", "and c: 800.0 Mbit/s, 100 us; the others' median is 8.0", "eth0"),
        (
            _job(links=(*LINKS[:2], _link("a", "c", 1.2e6), _link("b", "c", 1.3e6))),
            "warning c",
            "slow between it and a, b: 9.6 Mbit/s to 10.4 Mbit/s",
            "ethtool -S eth0 on c",
        ),
        (_job(links=(*LINKS[:3], _link("b", "c", late=0.02))), "warning b", "20 ms; the others' median is 100", "eth"),
        (_job(links=(_link("a", "b", 1e8),)), "warning a", "; the cards have 10.0 Gbit/s", "ethtool"),
    ],
}


def _wrong(subject: Subject) -> list[Finding]:
    return [one for one in checks.findings(subject, checks.CHECKS) if one.level != "ok"]


@pytest.mark.parametrize(
    ("check", "case"), [pytest.param(check, case, id=case[2]) for check, cases in CASES.items() for case in cases]
)
def test_each_fault_is_named_with_host_and_advice(check: str, case: tuple[Subject, str, str, str]) -> None:
    subject, where, text, remedy = case
    wrong = _wrong(subject)
    found = [one for one in wrong if one.check == check]
    assert found and f"{found[0].level} {found[0].host}".strip() == where, wrong
    assert text in found[0].text and remedy in found[0].remedy, found[0]
    # Other checks see no fault in it, but for those that follow from it.
    assert {one.check for one in wrong} <= {check, "job", "links"}, wrong


def test_nothing_is_wrong_with_healthy_hosts() -> None:
    found = checks.findings(HEALTHY, checks.CHECKS)
    assert _wrong(HEALTHY) == []
    assert [one.check for one in found] == [check.name for check in checks.CHECKS]
    assert command.summary(found) == "All is well."


@pytest.mark.parametrize(
    "fine",
    [
        _with(hosts=(Host("a", 2),), facts={"a": FACTS}, cards={}, network=None, job=Job(ranks={"a": 2}, how="x")),
        _on("b", "memory", shm_free=65536),  # one rank shares no memory
        _on("b", "disk", error="Read-only file system", free=0),  # rank 0 writes the run
        _on("b", "memory", open_files=-1),  # no limit
        _with(_gpus(0, 0, 0, slots=1), chosen_gpus=""),
    ],
)
def test_what_harms_nobody_is_no_fault(fine: Subject) -> None:
    assert _wrong(fine) == []


@pytest.mark.parametrize(
    ("chosen", "counts"), [(None, "222"), ("1", "122"), ("", "000"), ("-1", "000"), ("7", "022"), ("GPU-1", "122")]
)
def test_cuda_visible_devices_counts_as_for_the_launcher(chosen: str | None, counts: str) -> None:
    subject = _with(_gpus(2, 2, 2), chosen_gpus=chosen)
    assert "".join(str(len(subject.gpus_of(name) or ())) for name in HOSTS) == counts


def test_the_job_leaves_out_hosts_that_cannot_take_part() -> None:
    def left(subject: Subject) -> str:
        return "".join(host.name for host in checks.hosts_for_the_job(subject))

    assert left(HEALTHY) == "abc"
    assert left(_blocked("ab", "ba", "cb", "bc")) == "ac"
    assert left(_blocked("bc", "cb")) == "ab"
    assert left(_blocked("ab", "ac")) == "a"
    assert left(_on("b", "versions", code="other")) == "ac"
    assert left(_with(facts=dict.fromkeys("ac", FACTS))) == "ac"
    assert left(_on("b", "memory", open_files=64)) == "ac"
    assert left(_on("b", "memory", open_files=256)) == "abc"  # a warning
    assert left(_on("a", "disk", error="Read-only file system")) == "abc"


@given(st.lists(st.integers(1, 5), min_size=1, max_size=70))
def test_every_two_hosts_meet_once_and_nobody_twice_at_a_time(per_host: list[int]) -> None:
    planned = ranks.rounds(per_host)
    for met in planned:
        busy = [rank for pair in met for rank in pair]
        assert len(busy) == len(set(busy)) and met
    pairs = [pair for met in planned for pair in met]
    host_of = [host for host, count in enumerate(per_host) for _ in range(count)]
    between = [(host_of[a], host_of[b]) for a, b in pairs if host_of[a] != host_of[b]]
    assert len(pairs) == len(set(pairs)) and len(between) == len(set(between)) and all(a < b for a, b in pairs)
    hosts = len(per_host)
    assert len(between) == hosts * (hosts - 1) // 2 or hosts > ranks.MOST_ROUNDS
    assert {host for pair in between for host in pair} == set(range(hosts)) or hosts == 1
    assert len(pairs) - len(between) == sum(count > 1 for count in per_host)


OF_TWO = [Host("a", 2), Host("b", 1)]
VALUES = {"how": "3 ranks", "hosts": ["a", "a", "b"], "wrong_values": 0}
SAID = f"noise\n{job.RESULT}" + json.dumps({**VALUES, "links": [[[0, 2], 1e-4, 1e9, 0], [[0, 1], 1e-6, 5e9, 2]]})


def test_what_a_job_said_becomes_links_of_hosts() -> None:
    done = job.result_of(OF_TWO, 0, SAID, "hvd_cifar: note: 3 ranks share\n", None)
    assert (done.failure, done.how, done.complaints, done.pairs) == ("", "3 ranks", (), 1)
    assert [(link.a, link.b, link.ranks) for link in done.links] == [("a", "a", (0, 1)), ("a", "b", (0, 2))]
    assert [(link.seconds, link.bytes_per_second, link.wrong_values) for link in done.links][0] == (1e-6, 5e9, 2)


IMPORT = "rank 1 on a: Traceback\nrank 1 on a: ImportError: no libmpi\n"
HANGS = f"rank 0 on a: {job.BEGINS} 0 2\nrank 2 on b: {job.BEGINS} 0 2\nrank 2 on b: {job.ENDS} 0 2\n"
ENDED = f"{job.BEGINS} 0 1\n{job.ENDS} 0 1\n"


@pytest.mark.parametrize(
    ("code", "errors", "late", "failure", "pending"),
    [
        (1, IMPORT, None, "rank 1 on a: ImportError: no libmpi", ()),
        (2, "hvd_cifar: b cannot reach a\n", None, "b cannot reach a", ()),
        (0, "", None, "it ended with exit code 0 and said nothing", ()),
        (143, HANGS, 5.0, "no end within 5 s", (("a", "b"),)),
        (143, ENDED, 5.0, "no end within 5 s", ()),
    ],
)
def test_why_a_job_failed(code: int, errors: str, late: float | None, failure: str, pending: Any) -> None:
    done = job.result_of(OF_TWO, code, "", errors, late)
    assert (done.failure, done.pending) == (failure, pending)


def test_the_jobs_command() -> None:
    words = job.command(OF_TWO, named=True, ring=True)
    assert words == ["--allreduce", "ring", "-np", "3", "-H", "a:2,b:1", "doctor-job", "--per-host", "2,1"]
    alone = job.command([Host("localhost", 2)], named=False, ring=False)
    assert alone == ["-np", "2", "doctor-job", "--per-host", "2"]


def test_hosts_and_their_slots(tmp_path: Path) -> None:
    def hosts(**given: Any) -> list[tuple[str, int]]:
        return [(host.name, host.slots) for host in command.hosts_of(make(DoctorSettings, given))]

    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=2\n")
    assert hosts(hostfile=file) == [("a", 2), ("b", 2)]
    assert hosts(hostfile=file, ranks=3) == [("a", 2), ("b", 1)]
    assert hosts(hosts="a:2,b:2", ranks=2) == [("a", 2)]
    assert hosts(ranks=3) == [("localhost", 3)]
    nodes = (Host("n1", 2), Host("n2", 2))  # of a Slurm job
    assert command.hosts_of(make(DoctorSettings, {}), nodes) == nodes
    assert command.hosts_of(make(DoctorSettings, {"hosts": "a:2"}), nodes) == (Host("a", 2),)
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
    broken = _on("b", "versions", packages={**PACKAGES, "numpy": "2.3.0"})
    text = command.as_table(checks.findings(broken, checks.CHECKS, "--hostfile my-cluster"), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    row = next(line for line in lines if line.startswith("versions"))
    assert row.split()[:3] == ["versions", "FAIL", "b"] and "numpy 2.3.0, not 2.4.6" in row
    assert "-> ./run.sh setup --hostfile my-cluster" in text
    assert lines[-1] == "A run would fail: 1 failure."


def test_json_holds_all_of_it() -> None:
    said = json.loads(command.as_json(HEALTHY, checks.findings(HEALTHY, checks.CHECKS)))
    assert said["would_fail"] is False and said["findings"][0]["check"] == "ssh"
    assert said["job"]["how"] == "4 ranks" and len(said["job"]["links"]) == 4
    assert said["facts"]["b"]["versions"]["packages"]["numpy"] == "2.4.6"
    assert said["network"] == {"subnet": "10.0.0.0/24", "cards": {"a": "eth0", "b": "eth0", "c": "eth0"}}
