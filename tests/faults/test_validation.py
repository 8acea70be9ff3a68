"""Validation ranks beside training: the results of evaluations in training, and what the loss of either side does."""

from __future__ import annotations

import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import runs
from hvd_cifar.errors import RESUME
from hvd_cifar.reporting import sessions
from hvd_cifar.runtime import devices
from tests.faults.jobs import Running, start
from tests.options import slow_until

EVALUATED = ["--eval-every", 15, "--hold-out", 200, "--checkpoint-every", 1000]
# The same weights on any number of ranks.
SHORT = [*EVALUATED, "--max-steps", 60, "--virtual-shards", 2, "--global-batch-size", 32]


def _evaluations(run_dir: Path) -> dict[int, dict[str, Any]]:
    return {e["step"]: e for e in runs.events(run_dir) if e["event"] == "validation"}


def _validators(job: Running) -> list[psutil.Process]:
    """Validation ranks, and what has started them."""
    below = psutil.Process(job.process.pid).children(recursive=True)
    return [process for process in below if "validate" in process.cmdline()]


@pytest.fixture(scope="module")
def evaluated(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job of one rank that evaluates by itself."""
    job = start(["-np", 1], embedded, tmp_path_factory.mktemp("validation") / "alone", *SHORT)
    assert job.wait() == 0, job.said()
    return job.run_dir


def test_a_validation_rank_finds_what_training_ranks_would(evaluated: Path, embedded: Path, tmp_path: Path) -> None:
    """Training has the same weights to the bit; it is stopped once, and goes on."""
    launcher = ["-np", 3, "--validation-ranks", 1]
    job = start(launcher, embedded, tmp_path / "run", *SHORT, pace=slow_until(tmp_path / "stopped"))
    try:
        job.wait_for_step(20)
        job.send(signal.SIGTERM)
        assert job.wait() == RESUME and not job.left(), job.said()
        again = start(launcher, embedded, tmp_path / "run", *SHORT)
        assert again.wait() == 0 and not again.left(), again.said()
    finally:
        job.end()
    found, expected = _evaluations(job.run_dir), _evaluations(evaluated)
    missing = set(runs.summary(job.run_dir)["evaluations_missing"])  # where training was faster
    assert set(found) | missing == set(expected) == {15, 30, 45, 60} and 60 in found
    for step, one in found.items():
        assert one["validation_accuracy"] == expected[step]["validation_accuracy"]
        assert step == 60 or one["at_step"] >= step  # the training ranks evaluate the last step
        assert one["validation_loss"] == pytest.approx(expected[step]["validation_loss"], rel=1e-6)
    summary, other = runs.summary(job.run_dir), runs.summary(evaluated)
    assert summary["weights_sha256"] == other["weights_sha256"] and summary["world_size"] == 2
    assert summary["test_accuracy"] == other["test_accuracy"]
    if not missing:
        assert summary["best_evaluation"] == other["best_evaluation"]
    assert (job.run_dir / "best").resolve().name == f"step-{summary['best_evaluation']['step']}"
    assert not list((job.run_dir / "validation").glob("*.json")) and "validation ranks have ended" not in job.said()
    intervals = sessions.intervals(sessions.read((job.run_dir / sessions.SESSIONS).read_text()))
    # No second counts twice, also not while a checkpoint is written for the best weights.
    assert all(end <= begin + 1e-3 for (_, _, end), (_, begin, _) in itertools.pairwise(intervals)), intervals


@pytest.mark.slow
def test_a_killed_validation_rank_is_told_and_training_goes_on(embedded: Path, tmp_path: Path) -> None:
    """Two evaluate together, and one of them is killed after their first result."""
    told, launcher = tmp_path / "told", ["-np", 3, "--validation-ranks", 2]
    job = start(launcher, embedded, tmp_path / "run", *EVALUATED, "--max-steps", 300, pace=slow_until(told))
    try:
        job.wait_until(partial(job.has_said, "it came at step"))
        next(one for one in _validators(job) if "OMPI_COMM_WORLD_RANK" in one.environ()).kill()
        job.wait_until(partial(job.has_said, "validation ranks have ended (exit code 137)"))
        told.touch()
        assert job.wait() == 0, job.said()
    finally:
        job.end()
    threads = devices.threads_per_rank([frozenset(os.sched_getaffinity(0))] * 3, 0, devices.cpu_quota())
    assert f"1 rank, {threads} CPU thread" in job.said()  # the three share the cores
    assert job.said().count("was ended by signal 9 (Killed)") == 1 and not job.left()
    missing = runs.summary(job.run_dir)["evaluations_missing"]
    assert set(missing) | set(_evaluations(job.run_dir)) == set(range(15, 301, 15)) and 285 in missing


def test_a_killed_training_rank_ends_the_validation_ranks(embedded: Path, tmp_path: Path) -> None:
    job = start(["-np", 2, "--validation-ranks", 1], embedded, tmp_path / "run", "--eval-every", 10)
    try:
        job.wait_for_step(5)
        next(starter for starter in job.starters() if "validate" not in starter.cmdline()).kill()
        assert job.wait() == 128 + signal.SIGKILL and not job.left(), job.said()
    finally:
        job.end()
    assert "validation ranks have ended" not in job.said()
