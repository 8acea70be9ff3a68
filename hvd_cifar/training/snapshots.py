"""Snapshots of what evaluation needs: weights, moving statistics, averages. Files that two jobs pass to each other.

A snapshot is a checkpoint (`checkpoint_files`) in a folder `step-N`, which moves through folders of the run directory:

    snapshots/offered   training has written it; the next one replaces it
    snapshots/taken     validation ranks evaluate it; `result.json` in it is their `Evaluation`
    best                it has the highest accuracy so far

Each move is one rename, so a reader finds a whole snapshot or none, and neither job waits for the other. Where
training has removed a snapshot, its result is dropped. The hosts of both jobs share the disk of the run directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from filelock import FileLock, Timeout

from hvd_cifar.files import read_json, replace_text
from hvd_cifar.training import checkpoint_files
from hvd_cifar.training.checkpoint import State
from hvd_cifar.training.evaluate import Evaluation

RESULT = "result.json"


def best_of(run_dir: Path) -> Path:
    """The folder with a run's best snapshot."""
    return run_dir / "best"


def _offered(run_dir: Path) -> Path:
    return run_dir / "snapshots" / "offered"


def _taken(run_dir: Path) -> Path:
    return run_dir / "snapshots" / "taken"


def _lock(run_dir: Path) -> FileLock:
    return FileLock(run_dir / ".lock-validation")


def step_of(path: Path) -> int:
    """The step of a snapshot's folder."""
    return int(path.name.removeprefix("step-"))


class Snapshots:
    """The training job's side. Only rank 0 has one.

    Raises:
        OSError, tf.errors.OpError: where a file cannot be written.
    """

    def __init__(self, run_dir: Path, state: State, step: int) -> None:
        """`state`: what evaluation needs; `step`: at which the run begins, or goes on."""
        self.run_dir = run_dir
        self.state = state
        self.go_back(step)

    def go_back(self, step: int) -> None:
        """Remove what is of later steps, and offer again what nobody has finished."""
        offered, taken, best = _offered(self.run_dir), _taken(self.run_dir), best_of(self.run_dir)
        for folder in (offered, taken, best):
            checkpoint_files.clear(folder)
        for path in (*_in(offered), *_in(taken), *_in(best)):
            if step_of(path) > step:
                checkpoint_files.remove(path)
            elif path.parent == taken and not (path / RESULT).exists():
                with contextlib.suppress(OSError):
                    os.rename(path, offered / path.name)

    def offer(self, step: int) -> list[int]:
        """Write the present state for evaluation; the steps whose snapshots it replaces."""
        folder = _offered(self.run_dir)
        self._write(folder, step)
        older = [path for path in _in(folder) if step_of(path) < step]
        return sorted(step_of(path) for path in older if checkpoint_files.remove(path))

    def results(self) -> list[Evaluation]:
        """The evaluations that have come, by step."""
        return sorted(_results_in(_taken(self.run_dir)), key=lambda found: found.step)

    def pending(self) -> list[int]:
        """Steps whose evaluation has not come, ascending."""
        unfinished = [path for path in _in(_taken(self.run_dir)) if not (path / RESULT).exists()]
        return sorted(map(step_of, [*_in(_offered(self.run_dir)), *unfinished]))

    def best(self) -> Evaluation | None:
        """The evaluation of the best snapshot."""
        return next(_results_in(best_of(self.run_dir)), None)

    def keep(self, evaluation: Evaluation, step: int) -> None:
        """Make the snapshot of this evaluation the best one; where it is of this `step`, one is written if need be."""
        taken, best = _taken(self.run_dir) / f"step-{evaluation.step}", best_of(self.run_dir)
        if evaluation.step == step and not taken.exists():
            self._write(taken.parent, evaluation.step)
            answer(taken, evaluation)
        best.mkdir(exist_ok=True)
        checkpoint_files.remove(best / taken.name)
        os.rename(taken, best / taken.name)
        for path in _in(best):
            if path.name != taken.name:
                checkpoint_files.remove(path)

    def discard(self, step: int) -> None:
        """Remove the snapshot of an evaluation."""
        checkpoint_files.remove(_taken(self.run_dir) / f"step-{step}")

    def close(self) -> None:
        """Remove all but the best one."""
        shutil.rmtree(self.run_dir / "snapshots", ignore_errors=True)

    def has_readers(self) -> bool:
        """Whether validation ranks are there."""
        lock = _lock(self.run_dir)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            return True
        lock.release()
        return False

    def _write(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.state.step.assign(step)
        checkpoint_files.write(self.state.trackable, folder, step)


def follow(run_dir: Path) -> FileLock | None:
    """Be known as the reader of a run's snapshots, until the lock is released or the process ends; None: not yet."""
    if (run_dir / "config.json").exists():  # a lock would make the folder of a run that may not begin
        lock = _lock(run_dir)
        with contextlib.suppress(OSError, Timeout):
            lock.acquire(timeout=1)
            return lock
    return None


def take(run_dir: Path) -> Path | None:
    """Take the newest snapshot; None: there is none."""
    taken = _taken(run_dir)
    for path in _in(_offered(run_dir)):
        with contextlib.suppress(OSError):  # training has just removed it
            taken.mkdir(exist_ok=True)
            os.rename(path, taken / path.name)
            return taken / path.name
    return None


def answer(path: Path, evaluation: Evaluation) -> None:
    """Give the evaluation of a snapshot. Raises OSError where it is gone."""
    replace_text(path / RESULT, json.dumps(asdict(replace(evaluation, confusion=None))) + "\n")  # arrays are no JSON


def _in(folder: Path) -> list[Path]:
    """The snapshots of a folder, the newest first."""
    return checkpoint_files.listed(folder)


def _results_in(folder: Path) -> Iterator[Evaluation]:
    for path in _in(folder):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield Evaluation(**read_json(path / RESULT))
