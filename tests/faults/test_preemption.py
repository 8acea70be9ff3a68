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


@pytest.mark.parametrize("target", ["rank 1", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_a_stopped_run_goes_on_as_if_it_never_was(
    target: str, job: Any, alone: Path, embedded: Path, tmp_path: Path
) -> None:
    """SIGTERM to one of two ranks, and to mpirun. To the launcher: `test_validation`."""
    options = [*COURSE, "--checkpoint-every", 1000, "--eval-every", 90]
    running = job(["-np", 2], *options)
    running.send(signal.SIGTERM, target)
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
def test_output_that_cannot_be_written_neither_ends_a_job_nor_keeps_it_from_stopping(
    embedded: Path, tmp_path: Path
) -> None:
    """Nobody reads what is printed any more, and a disk is full: ranks train on, and save when they are asked to."""
    words = [sys.executable, "-m", "hvd_cifar.launch", "-np", 2, "train", *SMALL, embedded, "--batch-size", 16]
    words += ["--run-dir", tmp_path / "run", *OFTEN]
    with Path("/dev/full").open("wb") as full:
        job = subprocess.Popen(
            list(map(str, words)), stdout=subprocess.PIPE, stderr=full, env=environment(), cwd=CHECKOUT
        )
    running = Running(job, tmp_path / "run", tmp_path / "nothing")
    running.output.touch()
    try:
        running.wait_for_step(1)
        assert job.stdout
        job.stdout.close()
        running.wait_for_step(max(runs.losses(running.run_dir)) + 50)
        running.send(signal.SIGTERM)
        assert running.wait() == RESUME
    finally:
        running.end()
    assert len(checkpoints(running.run_dir)) == 1 and _ends(running.run_dir) == ["stopped"] and not running.left()


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
    while "sleep" not in {child.name() for child in psutil.Process(job.pid).children()}:
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


@pytest.mark.slow
def test_stopped_before_the_first_step(embedded: Path, tmp_path: Path) -> None:
    """Ranks that are still importing TensorFlow have nothing to save; the code is the same."""
    running = start(["-np", 2], embedded, tmp_path / "run")
    try:
        running.wait_until(lambda: len(running.ranks()) == 2)
        running.send(signal.SIGTERM)
        assert running.wait() == RESUME, running.said()
        assert not runs.losses(tmp_path / "run") and not running.left()
    finally:
        running.end()
