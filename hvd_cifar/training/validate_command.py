"""The `validate` command: evaluates snapshots of a run that another job trains (--validation-ranks)."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from filelock import FileLock

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import snapshots, user_code, user_files
from hvd_cifar.training.evaluate import Evaluation, make_evaluator
from hvd_cifar.training.trained import rebuild, settings_of
from hvd_cifar.training.work import UserObjects, load_data, model_of
from hvd_cifar.use_settings import ValidateSettings

SECONDS_BETWEEN_LOOKS = 0.5


def validate_run(settings: ValidateSettings) -> None:
    """Evaluate each newest snapshot on all ranks of this job, until a signal ends it."""
    signal.signal(signal.SIGTERM, _end)
    with session() as world:
        held: list[FileLock] = []
        evaluate = None
        while True:
            path = collectives.on_root(partial(_take, settings.run_dir, held))
            if path is None:
                time.sleep(SECONDS_BETWEEN_LOOKS)  # on every rank: waiting in a collective would keep a core busy
                continue
            # Only now: training writes config.json, which the evaluator reads, before the first snapshot.
            evaluate = evaluate or _evaluator(settings.run_dir, world)
            found = evaluate(path)
            if world.is_root and found:
                with contextlib.suppress(OSError):  # training has returned to an earlier step, and removed the snapshot
                    snapshots.answer(path, found)


def _take(run_dir: Path, held: list[FileLock]) -> Path | None:
    """Rank 0's part: the newest snapshot; None: none is there. `held`: the lock, once there is a run."""
    if not held and (lock := snapshots.follow(run_dir)):
        held.append(lock)
    return snapshots.take(run_dir) if held else None


class _Ended(SystemExit):
    """The launcher ends this job: training is done."""


def _end(*_: object) -> None:
    raise _Ended(0)


def _evaluator(run_dir: Path, world: World) -> Callable[[Path], Evaluation | None]:
    """A function that evaluates a snapshot, or returns None where it is gone. Both are collectives."""
    settings = collectives.on_root(lambda: settings_of(run_dir))
    user_code.use_copies(collectives.on_root(lambda: user_files.copies_of(run_dir)))
    model = model_of(settings, UserObjects())
    trained = collectives.host_by_host(lambda: rebuild(settings, model, run_dir))
    dataset = load_data(settings, world, None)
    part = "validation" if dataset.validation else "test"
    evaluate = make_evaluator(trained.model, dataset, trained.transforms, world, None, part)

    def evaluate_snapshot(path: Path) -> Evaluation | None:
        try:
            trained.read(path)
        except UserError:
            if collectives.on_root(path.exists):
                raise
            return None
        return replace(evaluate(False), step=snapshots.step_of(path))

    return evaluate_snapshot
