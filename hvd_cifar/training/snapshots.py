"""Snapshots of what evaluation needs: weights, moving statistics, averages. The training job hands them to the
validation job through files, and gets results back.

A snapshot is a checkpoint (`checkpoint`) in a folder `step-N`:

    snapshots/step-N    written by the training job; the validation job adds `result.json`, its `Evaluation`
    snapshots/alive     the validation job's present step (-1: none) and process; written again while it makes progress
    best/step-N         the snapshot with the highest accuracy, and its result

A newer snapshot replaces those that nobody evaluates. A reader finds a whole snapshot or none, and neither job waits
for the other. If training has removed a snapshot, its result is dropped. The hosts of both jobs must share the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout

from hvd_cifar.files import read_json, replace_text
from hvd_cifar.training import checkpoint
from hvd_cifar.training.callbacks import Run
from hvd_cifar.training.evaluate import Evaluation
from hvd_cifar.training.state import TrainState

RESULT = "result.json"


def step_of(path: Path) -> int:
    """The step of a snapshot's folder."""
    return int(path.name.removeprefix("step-"))


def open_snapshots(run: Run) -> Snapshots | None:
    """The snapshots of a run, at its present step. None on ranks other than 0, and where they cannot be written."""
    if run.world.is_root:
        state = TrainState(run.model)
        if averages := run.state.part("averages"):
            state.add("averages", averages, core=True)
        with run.files_may_fail("weights cannot be kept for evaluations"):
            return Snapshots(run.run_dir, state, int(run.state.step.numpy()))
    return None


class Snapshots:
    """The training job's side; only rank 0 has one. Raises OSError where a file cannot be written."""

    def __init__(self, run_dir: Path, state: TrainState, step: int) -> None:
        """`state`: what evaluation needs; `step`: where the run begins or resumes."""
        self.folder, self.best_folder = run_dir / "snapshots", run_dir / "best"
        self.state = state
        self._lock = _lock(run_dir)
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Remove snapshots of later steps."""
        for folder in (self.folder, self.best_folder):
            checkpoint.clear(folder)
            for path in checkpoint.listed(folder):
                if step_of(path) > step:
                    checkpoint.remove(path)

    def offer(self, step: int) -> list[int]:
        """Write the current state as a snapshot, and return the steps whose snapshots it replaces."""
        self._write(self.folder, step)
        taken = (step, self.sign_of_life()[1])
        return [older for older in self.pending() if older not in taken and self.discard(older)]

    def results(self) -> list[Evaluation]:
        """The finished evaluations, in the order of steps."""
        return sorted(_results_in(self.folder), key=lambda found: found.step)

    def pending(self) -> list[int]:
        """Steps whose evaluation is not finished, ascending."""
        return sorted(map(step_of, _unfinished(self.folder)))

    def best(self) -> Evaluation | None:
        """The evaluation of the best snapshot."""
        return next(_results_in(self.best_folder), None)

    def keep(self, evaluation: Evaluation, step: int) -> None:
        """Make this evaluation's snapshot the best one; write one if it is of the current `step` and has none."""
        offered, best = (folder / f"step-{evaluation.step}" for folder in (self.folder, self.best_folder))
        if evaluation.step == step and not offered.exists():
            self._write(self.folder, step)
            answer(offered, evaluation)
        self.best_folder.mkdir(exist_ok=True)
        checkpoint.remove(best)
        os.rename(offered, best)
        for path in checkpoint.listed(self.best_folder):
            if path != best:
                checkpoint.remove(path)

    def discard(self, step: int) -> bool:
        """Remove a step's snapshot; False where there is none."""
        return checkpoint.remove(self.folder / f"step-{step}")

    def close(self) -> None:
        """Remove all snapshots except the best one."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def has_readers(self) -> bool:
        """Whether a validation job follows this run."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return True
        self._lock.release()
        return False

    def sign_of_life(self) -> tuple[int, int, str]:
        """The validation job's newest one: when, by the disk's clock, the step that it evaluates, its process."""
        path = self.folder / "alive"
        try:
            step, _, process = path.read_text().partition(" ")
            return path.stat().st_mtime_ns, int(step), process
        except (OSError, ValueError):  # it has not begun
            return 0, -1, "their first process"

    def _write(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state.step.assign(step)
        checkpoint.write(folder, step, checkpoint.values_of(self.state))


def follow(run_dir: Path) -> FileLock | None:
    """Lock a run's snapshots as their reader (`Snapshots.has_readers`). None: no run is there, or another reader."""
    if (run_dir / "config.json").exists():  # without it, the lock would make the folder of a run that may never begin
        lock = _lock(run_dir)
        with contextlib.suppress(OSError, Timeout):
            lock.acquire(timeout=1)
            return lock
    return None


def take(run_dir: Path) -> Path | None:
    """The newest snapshot without a result, which this job is going to evaluate; None: there is none."""
    alive = run_dir / "snapshots" / "alive"
    found = next(_unfinished(alive.parent), None)
    text = f"{step_of(found) if found else -1} process {os.getpid()} on {socket.gethostname()}"
    with contextlib.suppress(OSError):  # training has not offered a snapshot, or removes them at its end
        if alive.exists() and alive.read_text() == text:
            os.utime(alive)
        else:
            replace_text(alive, text)
    return found


def answer(path: Path, evaluation: Evaluation) -> None:
    """Write the evaluation of a snapshot into it. Raises OSError where the snapshot is gone."""
    replace_text(path / RESULT, json.dumps(asdict(replace(evaluation, confusion=None))) + "\n")  # arrays are not JSON


def _lock(run_dir: Path) -> FileLock:
    return FileLock(run_dir / ".lock-validation")


def _unfinished(folder: Path) -> Iterator[Path]:
    """The snapshots of a folder without a result, the newest first."""
    return (path for path in checkpoint.listed(folder) if not (path / RESULT).exists())


def _results_in(folder: Path) -> Iterator[Evaluation]:
    for path in checkpoint.listed(folder):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Evaluation(**read_json(path / RESULT))
