"""Evaluation by other ranks while these train (--validation-ranks): the part of the training job, and the other job.

The two jobs share the run directory:

    checkpoints/step-N         training writes one where an evaluation is due
    validation/step-N.json     empty: training asks for the evaluation of that checkpoint; then the result

The validation job takes the newest checkpoint that is asked for. Neither job waits for the other before training ends.
Where training goes back to an earlier step, it removes what it has asked for since, and the result is dropped.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from hvd_cifar.errors import UserError
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.config import ValidateSettings
    from hvd_cifar.runtime.world import World
    from hvd_cifar.training.evaluate import Evaluation

FLAG = "news"  # 1 on rank 0 if results have arrived
SECONDS_BETWEEN_LOOKS = 1.0  # for results, while training
SECONDS_BETWEEN_LAST_LOOKS = 0.2  # after the last step; of the validation job: for checkpoints
SECONDS_TO_COME = 60.0  # for validation ranks to start, from the first step on
SECONDS_FOR_LAST = 600.0  # for the last result, after the last step
UNREAD = "results of validation ranks cannot be read"


def make(run: Run) -> Callback | None:
    return RemoteEvaluation() if run.world.beside else None


def asked_for(run_dir: Path) -> dict[int, Path]:
    """The files of the folder `validation` by step, ascending; empty ones have no result yet."""
    return dict(sorted((int(path.stem.removeprefix("step-")), path) for path in _place(run_dir).glob("step-*.json")))


def newest_without_result(run_dir: Path) -> int | None:
    """The step of the newest checkpoint that is asked for; None: it has its result, or there is none."""
    step, path = max(asked_for(run_dir).items(), default=(0, None))
    return step if path and not path.stat().st_size and _checkpoint(run_dir, step).exists() else None


def answer(run_dir: Path, found: Evaluation) -> None:
    """Write a result, where training still asks for it."""
    if path := asked_for(run_dir).get(found.step):
        found.write(path)


def has_readers(run_dir: Path) -> bool:
    """Whether a validation job follows the run."""
    try:
        with _lock(run_dir).acquire(timeout=0):
            return False
    except Timeout:
        return True


def _place(run_dir: Path) -> Path:
    return run_dir / "validation"


def _checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step}"


def _lock(run_dir: Path) -> FileLock:
    return FileLock(run_dir / ".lock-validation")


class RemoteEvaluation(Callback):
    """Asks for evaluations where they are due, and reports results.

    Only rank 0 reads files. It tells the others with a step's loss that results have arrived, and broadcasts them.
    """

    def __init__(self) -> None:
        self.began = self.looked = time.monotonic()
        self.results: list[Evaluation] = []  # on rank 0, not yet reported

    def on_build(self, run: Run) -> None:
        """Leave evaluations during training to the other job. Rank 0 tells the others of results with a flag."""
        run.is_evaluated_here = False
        run.progress.own_flags[FLAG] = 0.0

    def on_start(self, run: Run) -> None:
        self.began = time.monotonic()
        self._forget(run)

    def before_steps(self, run: Run) -> None:
        """Ask for the evaluation that was put off when the run stopped."""
        self._ask(run)

    def on_step(self, run: Run) -> None:
        if run.progress.flags[FLAG] > 0:
            self._report(run)
        self._ask(run)
        if time.monotonic() > self.looked + SECONDS_BETWEEN_LOOKS:
            self._look(run)

    def on_end(self, run: Run) -> None:
        """Wait for the last result. The training ranks evaluate the last step themselves."""
        run.progress.check_losses()
        with run.aside("evaluation"):
            end, waits = time.monotonic() + SECONDS_FOR_LAST, True
            while waits:
                run.progress.watch.mark("validation")
                time.sleep(SECONDS_BETWEEN_LAST_LOOKS)
                waits = run.ranks.broadcast_object(self._is_awaited(run, end))  # first: the last look misses nothing
                self._look(run)
                self._report(run)
        self._close(run, run.step + 1, "no validation rank has answered")

    def _is_awaited(self, run: Run, end: float) -> bool:
        """Whether a result may still arrive; False on ranks other than 0."""
        now = time.monotonic()
        with run.files_may_fail(UNREAD):
            if run.world.is_root and newest_without_result(run.run_dir) is not None and now < end:
                return has_readers(run.run_dir) or now < self.began + SECONDS_TO_COME
        return False

    def _ask(self, run: Run) -> None:
        """Where an evaluation is due, write a checkpoint, and ask for its evaluation. A collective."""
        if not run.evaluation_is_due or run.progress.stop_requested:  # then the evaluation is put off
            return
        run.save()
        if run.world.is_root and run.step not in run.reporter.evaluated[run.watched]:
            with run.files_may_fail(f"step {run.step} is not evaluated"):
                _place(run.run_dir).mkdir(exist_ok=True)
                (_place(run.run_dir) / f"step-{run.step}.json").touch()

    def _look(self, run: Run) -> None:
        """Rank 0's part: read results."""
        from hvd_cifar.training.evaluate import Evaluation

        self.looked = time.monotonic()
        if run.world.is_root:
            with run.files_may_fail(UNREAD):
                self.results = [found for path in asked_for(run.run_dir).values() if (found := Evaluation.read(path))]
            run.progress.own_flags[FLAG] = float(bool(self.results))

    def _report(self, run: Run) -> None:
        """Report results on all ranks. A collective."""
        for found in run.ranks.broadcast_object(self.results):
            self._close(run, found.step, f"the evaluation of step {found.step} came first")
            if math.isfinite(found.loss):
                epoch = round(found.step / run.plan.steps_per_epoch, 4)
                run.evaluation = found
                run.reporter.evaluation(found.step, epoch, found.values, found.part, at_step=run.step)
                run.tell("on_evaluation", found)
            else:
                run.reporter.missing(found.step, f"its {found.part} loss is {found.loss}")
        self._forget(run)

    def _close(self, run: Run, step: int, why: str) -> None:
        """No longer ask for evaluations up to a step; report earlier ones as missing. Rank 0's part."""
        if run.world.is_root:
            with run.files_may_fail(UNREAD):
                for other, path in asked_for(run.run_dir).items():
                    if other < step:
                        run.reporter.missing(other, why)
                    if other <= step:
                        path.unlink()

    def _forget(self, run: Run) -> None:
        """Have no results, and ask for no evaluation of a later step."""
        self.results = []
        run.progress.own_flags[FLAG] = run.progress.flags[FLAG] = 0.0
        if run.world.is_root:
            with run.files_may_fail(UNREAD):
                for step, path in asked_for(run.run_dir).items():
                    if step > run.step:
                        path.unlink()


def validate_run(settings: ValidateSettings) -> None:
    """Evaluate the newest checkpoint that a run asks for, on all ranks of this job, until a signal ends it."""
    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import session

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the launcher ends this job: training is done
    run_dir, evaluate = settings.run_dir, None
    lock = _lock(run_dir)

    def take() -> int | None:
        """Rank 0's part. Before there is a run, the lock would make the folder of one that may never begin."""
        with contextlib.suppress(OSError, Timeout):  # another one evaluates, or training is removing a file
            if not lock.is_locked and (run_dir / "config.json").exists():
                lock.acquire(timeout=1)
            if lock.is_locked:
                return newest_without_result(run_dir)
        return None

    with session() as world:
        while True:
            step = collectives.on_root(take)
            if step is None:
                time.sleep(SECONDS_BETWEEN_LAST_LOOKS)  # on every rank: waiting in a collective would keep a core busy
                continue
            # Only now: training writes config.json, which the evaluator reads, before the first checkpoint.
            evaluate = evaluate or _evaluator(run_dir, world)
            found = evaluate(step)
            if world.is_root and found:
                with contextlib.suppress(OSError):  # training has returned to an earlier step
                    answer(run_dir, found)


def _evaluator(run_dir: Path, world: World) -> Callable[[int], Evaluation | None]:
    """A function that evaluates a step's checkpoint, or returns None where it is gone. Both are collectives."""
    from hvd_cifar.distributed import collectives
    from hvd_cifar.training.evaluate import make_evaluator
    from hvd_cifar.training.trained import rebuild, settings_of
    from hvd_cifar.training.work import load_data

    settings = collectives.on_root(lambda: settings_of(run_dir))
    trained = rebuild(settings, run_dir)
    dataset = load_data(settings, world, None)
    part = "validation" if dataset.validation else "test"
    evaluate = make_evaluator(trained.model, dataset, trained.transforms, world, part)

    def evaluate_checkpoint(step: int) -> Evaluation | None:
        path = _checkpoint(run_dir, step)
        try:
            trained.read(path)
        except UserError:
            if collectives.on_root(path.exists):
                raise
            return None
        return replace(evaluate(False), step=step)

    return evaluate_checkpoint
