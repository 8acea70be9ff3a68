"""The doctor's probe on this machine: what it tells, and what it does where a group hangs or fails."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.runtime import devices
from hvd_cifar.tools.doctor import ask
from hvd_cifar.tools.doctor.facts import GROUPS, HostFacts

QUESTIONS = {"quota_files": devices.QUOTA_FILES}


def _ask(tmp_path: Path, python: str = sys.executable, **more: Any) -> HostFacts:
    places = {"package": str(tmp_path), "run_dir": str(tmp_path / "not" / "yet")}
    answers = ask.ask_all(Participants(["here"], "here", python), {**QUESTIONS, **places, **more}, 60)
    assert not answers["silent"]
    found: HostFacts = answers["facts"]["here"]
    return found


def test_this_machine_tells_its_facts(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    found = _ask(tmp_path)
    assert not found.missing
    assert found.cpu and found.cpu.cores > 0 and found.memory and found.memory.available > 0
    assert found.versions and found.versions.packages["psutil"] and len(found.versions.code) == 64
    assert "Open MPI" in found.versions.mpi
    assert found.disk and (found.disk.folder, found.disk.error) == (str(tmp_path), "")


def test_the_limit_of_open_files_is_the_one_that_holds(tmp_path: Path) -> None:
    """The soft one, which a process meets; not the hard one, up to which it could be raised."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nulimit -S -n 97\nexec '{sys.executable}' \"$@\"\n")
    python.chmod(0o755)
    memory = _ask(tmp_path, python=str(python)).memory
    assert memory and memory.open_files == 97


def test_a_group_that_fails_costs_no_other(tmp_path: Path) -> None:
    found = _ask(tmp_path, package=5)  # no path
    assert set(found.missing) == {"versions"} and "TypeError" in found.missing["versions"]
    assert found.disk is not None


def _hanging(before: str) -> str:
    """The probe, which hangs in its second group."""
    start = "def memory(asked: Asked) -> Any:\n"
    text = ask.PROBE.read_text()
    assert start in text
    return text.replace(start, f"{start}    import time; {before}; time.sleep(600)\n")


def test_a_host_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hangs in the middle of its facts: the facts before count, and the group that hangs is named."""
    hung, hangs = tmp_path / "probe.py", tmp_path / "hangs"
    hung.write_text(_hanging(f"open({str(hangs)!r}, 'w').close()"))
    monkeypatch.setattr(ask, "PROBE", hung)

    def time_is_up_when_it_hangs(_: float, stop: Callable[[], None]) -> threading.Thread:
        def wait() -> None:
            while not hangs.exists():
                time.sleep(0.05)
            stop()

        return timer(0, wait)

    timer = threading.Timer
    monkeypatch.setattr(threading, "Timer", time_is_up_when_it_hangs)
    found = _ask(tmp_path)
    assert found.missing == dict.fromkeys(GROUPS[GROUPS.index("memory") :], "no answer in time")
    assert found.cpu is not None


def test_the_probe_ends_with_whoever_asks() -> None:
    process = subprocess.Popen(
        [sys.executable, "-I", "-c", _hanging("pass")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps(QUESTIONS).encode() + b"\n")
    process.stdin.flush()
    assert json.loads(process.stdout.readline())["group"] == "cpu"
    process.stdin.close()
    assert process.wait(60) == 0
