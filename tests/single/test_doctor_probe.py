"""The doctor's probe on this machine: what it tells, and what it does where the host hangs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.tools.doctor import facts
from hvd_cifar.tools.doctor.facts import Subject


def _ask(tmp_path: Path, seconds: float = 60) -> Subject:
    participants = Participants(["here"], "here", sys.executable)
    return facts.ask((Host("here", 1),), participants, tmp_path / "not" / "yet", seconds)


def test_this_machine_tells_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'GPU 0: H200 (UUID: GPU-a)'\necho 'GPU 1: H200 (UUID: GPU-b)'\n"
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    found = _ask(tmp_path).facts["here"]
    assert found.memory > 0 and found.packages["psutil"] and len(found.code) == 64
    assert found.gpus == ["GPU-b"]
    assert (found.folder, found.folder_error, found.temporary_error) == (str(tmp_path), "", "")


def test_a_host_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hung = tmp_path / "probe.py"
    hung.write_text("import time; time.sleep(600)")
    monkeypatch.setattr(facts, "PROBE", hung)
    found = _ask(tmp_path, 0.5)
    assert not found.facts and found.silent["here"][0] == "here does not answer within 0.5 s"


def test_the_probe_ends_with_whoever_asks() -> None:
    text = facts.PROBE.read_text().replace("print(json", "threading.Event().wait(); print(json")
    process = subprocess.Popen([sys.executable, "-I", "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin
    process.stdin.write(b'{"run_dir": "/", "visible_gpus": null}\n')
    process.stdin.close()
    assert process.wait(60) == 0
