"""Snapshots of what evaluation needs: weights, moving statistics, averages. The training job hands them to the
validation job through files, and gets results back.

A snapshot is a checkpoint (`checkpoint`) in a folder `step-N`, which moves through folders of the run directory:

    snapshots/offered   written by the training job; the next snapshot replaces it
    snapshots/taken     under evaluation; then `result.json` in it holds the `Evaluation`
    snapshots/alive     which process evaluates; written again while it makes progress
    best                the snapshot with the highest accuracy

Each move is one rename, so a reader finds a whole snapshot or none, and neither job waits for the other. If training
has removed a snapshot, its result is dropped. The hosts of both jobs must share the disk of the run directory.
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


def best_of(run_dir: Path) -> Path:
    """The folder with a run's best snapshot."""
    return run_dir / "best"


def _offered(run_dir: Path) -> Path:
    return run_dir / "snapshots" / "offered"


def _taken(run_dir: Path) -> Path:
    return run_dir / "snapshots" / "taken"


def _alive(run_dir: Path) -> Path:
    return run_dir / "snapshots" / "alive"


def _lock(run_dir: Path) -> FileLock:
    return FileLock(run_dir / ".lock-validation")


def step_of(path: Path) -> int:
    """The step of a snapshot's folder."""
    return int(path.name.removeprefix("step-"))


def weights_of(run: Run) -> TrainState:
    """What an evaluation needs of a run's state: the model, and averages of its weights."""
    state = TrainState(run.model)
    if averages := run.state.part("averages"):
        state.add_core("averages", averages)
    return state


def open_snapshots(run: Run) -> Snapshots | None:
    """The snapshots of a run, at its present step. None on ranks other than 0, and where they cannot be written."""
    if run.world.is_root:
        with run.files_may_fail("weights cannot be kept for evaluations"):
            return Snapshots(run.run_dir, weights_of(run), int(run.state.step.numpy()))
    return None


class Snapshots:
    """The training job's side. Only rank 0 has one.

    Raises:
        OSError: where a file cannot be written.
    """

    def __init__(self, run_dir: Path, state: TrainState, step: int) -> None:
        """`state`: what evaluation needs; `step`: where the run begins or resumes."""
        self.run_dir = run_dir
        self.state = state
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Remove snapshots of later steps, and offer again those whose evaluation is unfinished."""
        offered, taken, best = _offered(self.run_dir), _taken(self.run_dir), best_of(self.run_dir)
        for folder in (offered, taken, best):
            checkpoint.clear(folder)
        for path in (*_in(offered), *_in(taken), *_in(best)):
            if step_of(path) > step:
                checkpoint.remove(path)
            elif path.parent == taken and not (path / RESULT).exists():
                with contextlib.suppress(OSError):
                    os.rename(path, offered / path.name)

    def offer(self, step: int) -> list[int]:
        """Write the current state as a snapshot, and return the steps whose snapshots it replaces."""
        folder = _offered(self.run_dir)
        self._write(folder, step)
        older = [path for path in _in(folder) if step_of(path) < step]
        return sorted(step_of(path) for path in older if checkpoint.remove(path))

    def results(self) -> list[Evaluation]:
        """The finished evaluations, in the order of steps."""
        return sorted(_results_in(_taken(self.run_dir)), key=lambda found: found.step)

    def pending(self) -> list[int]:
        """Steps whose evaluation is not finished, ascending."""
        unfinished = [path for path in _in(_taken(self.run_dir)) if not (path / RESULT).exists()]
        return sorted(map(step_of, [*_in(_offered(self.run_dir)), *unfinished]))

    def best(self) -> Evaluation | None:
        """The evaluation of the best snapshot."""
        return next(_results_in(best_of(self.run_dir)), None)

    def keep(self, evaluation: Evaluation, step: int) -> None:
        """Make this evaluation's snapshot the best one; write one if it is of the current `step` and has none."""
        taken, best = _taken(self.run_dir) / f"step-{evaluation.step}", best_of(self.run_dir)
        if evaluation.step == step and not taken.exists():
            self._write(taken.parent, evaluation.step)
            answer(taken, evaluation)
        best.mkdir(exist_ok=True)
        checkpoint.remove(best / taken.name)
        os.rename(taken, best / taken.name)
        for path in _in(best):
            if path.name != taken.name:
                checkpoint.remove(path)

    def discard(self, step: int) -> None:
        """Remove the snapshot of an evaluated step."""
        checkpoint.remove(_taken(self.run_dir) / f"step-{step}")

    def close(self) -> None:
        """Remove all snapshots except the best one."""
        shutil.rmtree(self.run_dir / "snapshots", ignore_errors=True)

    def has_readers(self) -> bool:
        """Whether a validation job follows this run."""
        lock = _lock(self.run_dir)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def sign_of_life(self) -> tuple[int, str]:
        """When the validation job showed last that it makes progress, by the disk's clock, and its process in words."""
        path = _alive(self.run_dir)
        try:
            return path.stat().st_mtime_ns, path.read_text()
        except OSError:  # it has not begun
            return 0, "their first process"

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


def show_life(run_dir: Path) -> None:
    """Show training that this job makes progress."""
    with contextlib.suppress(OSError):  # training has not offered a snapshot, or removes them at its end
        _alive(run_dir).write_text(f"process {os.getpid()} on {socket.gethostname()}")


def take(run_dir: Path) -> Path | None:
    """Take the newest offered snapshot; None: there is none."""
    taken = _taken(run_dir)
    for path in _in(_offered(run_dir)):
        with contextlib.suppress(OSError):  # training removed it in the meantime
            taken.mkdir(exist_ok=True)
            os.rename(path, taken / path.name)
            return taken / path.name
    return None


def answer(path: Path, evaluation: Evaluation) -> None:
    """Write the evaluation of a snapshot into it. Raises OSError where the snapshot is gone."""
    replace_text(path / RESULT, json.dumps(asdict(replace(evaluation, confusion=None))) + "\n")  # arrays are not JSON


def _in(folder: Path) -> list[Path]:
    """The snapshots of a folder, the newest first."""
    return checkpoint.listed(folder)


def _results_in(folder: Path) -> Iterator[Evaluation]:
    for path in _in(folder):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Evaluation(**read_json(path / RESULT))
