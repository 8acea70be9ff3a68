"""Signals to the launcher, to what starts ranks, and to a rank: one checkpoint, exit code 75, and nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import runs
from hvd_cifar.errors import RESUME
from hvd_cifar.reporting import sessions
from tests.faults.jobs import COURSE, STEPS, Running, checkpoints, start
from tests.options import PACE, SMALL
from tests.ranks import CHECKOUT, environment

OFTEN = ["--log-every", 1, "--eval-every", 0, "--callbacks", PACE]


@pytest.fixture
def job(embedded: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job that trains in `tmp_path`/run, and wait until it has made steps."""
    jobs: list[Running] = []

    def begin(launcher: list[Any], *options: Any) -> Running:
        before = max(runs.losses(tmp_path / "run"), default=0)
        jobs.append(start(launcher, embedded, tmp_path / "run", *options))
        jobs[-1].wait_for_step(before + 5)
        return jobs[-1]

    yield begin
    for running in jobs:
        running.end()


def test_a_stopped_run_goes_on_as_if_it_never_was(job: Any, alone: Path, embedded: Path, tmp_path: Path) -> None:
    """SIGTERM to one of two ranks. To the launcher: `test_validation`."""
    options = [*COURSE, "--checkpoint-every", 1000, "--eval-every", 90]
    running = job(["-np", 2], *options)
    running.send(signal.SIGTERM, "rank 1")
    assert running.wait() == RESUME, running.said()
    said = running.said()
    (step,) = re.findall(r"stopped after step (\d+); the checkpoint of step \1 is kept", said)
    assert "Traceback" not in said and "mpirun" not in said and "signal" not in said, said
    assert not running.left() and checkpoints(tmp_path / "run") == [int(step)] and int(step) < STEPS
    cut = start(["-np", 2], embedded, tmp_path / "run", *options)
    assert cut.wait() == 0, cut.said()
    assert f"resumed from {tmp_path}/run/checkpoints/step-{step}" in cut.said()
    one, other = runs.summary(tmp_path / "run"), runs.summary(alone)
    assert one["weights_sha256"] == other["weights_sha256"]
    assert (one["test_accuracy"], one["train_loss"]) == (other["test_accuracy"], other["train_loss"])
    assert runs.losses(tmp_path / "run") == runs.losses(alone)
    assert _ends(tmp_path / "run") == ["stopped", "complete"]


def _ends(run_dir: Path) -> list[str]:
    """How each life of a run ended."""
    return [mark["how"] for mark in sessions.read((run_dir / "sessions.jsonl").read_text()) if mark["mark"] == "end"]


@pytest.mark.slow
def test_a_signal_before_any_rank_has_started(embedded: Path, tmp_path: Path) -> None:
    """While the launcher asks a host that does not answer."""
    fake = tmp_path / "ssh"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{environment()['PATH']}"
    words = [sys.executable, "-m", "hvd_cifar.launch", "-H", "localhost:1,silent:1", "train", *SMALL, str(embedded)]
    job = subprocess.Popen(
        [*words, "--run-dir", str(tmp_path / "run")],
        env=environment({"PATH": path}),
        stderr=subprocess.PIPE,
        cwd=CHECKOUT,
    )
    while "sleep" not in {child.name() for child in psutil.Process(job.pid).children(recursive=True)}:
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    _, said = job.communicate(timeout=60)
    assert job.returncode == RESUME and b"SIGUSR1 before any rank has started" in said, said
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_ends_the_job_at_once(job: Any) -> None:
    """Rank 0 stands still, so no checkpoint comes after the first one."""
    running = job(["-np", 2])
    running.send(signal.SIGSTOP, "rank 0")
    running.send(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        running.process.wait(1)
    running.send(signal.SIGINT)
    assert running.wait(20) == 128 + signal.SIGINT, running.said()  # mpirun takes 2 s to kill
    assert not running.left()


@pytest.mark.slow
def test_a_checkpoint_that_does_not_come_in_time(job: Any, tmp_path: Path) -> None:
    """The other rank's collective hangs in native code, where no handler of Python's would run."""
    running = job(["-np", 2], "--grace-seconds", 3)
    running.send(signal.SIGSTOP, "rank 1")
    running.send(signal.SIGTERM)
    assert running.wait(60) == RESUME
    assert "no checkpoint within 3 s of SIGUSR1; the run ends; nothing was saved" in running.said()
    assert not checkpoints(tmp_path / "run") and not running.left()
