"""Evaluation by another job while this one trains (`Beside`); the best weights and early stopping (`Best`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import reason_of
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.stalls import FACTOR, FLOOR, PATIENCE
from hvd_cifar.training.callbacks import Callback, MovingStatistics, Tell
from hvd_cifar.training.evaluate import Evaluation
from hvd_cifar.training.progress import Progress, Run
from hvd_cifar.training.snapshots import Snapshots

SECONDS_BETWEEN_LOOKS = 1.0  # for results, while training
SECONDS_BETWEEN_LAST_LOOKS = 0.2  # after the last step
SECONDS_TO_COME = 300.0  # for validation ranks to start, from the first step on
SECONDS_FOR_LAST = 600.0  # for missing results, after the last step


class Beside(Callback):
    """Offers snapshots to validation ranks (--validation-ranks) where an evaluation is due, and reports their results.

    Only rank 0 reads the files. It tells the others with a step's loss (`Notes.news`) that results have arrived, and
    then broadcasts them.
    """

    def __init__(
        self,
        progress: Progress,
        snapshots: Snapshots | None,
        statistics: MovingStatistics,
        reporter: Reporter,
        tell: Tell,
        watched: str,
    ) -> None:
        """`snapshots`: None on ranks other than 0; `watched`: the part of the data set that is evaluated."""
        self.progress = progress
        self.snapshots = snapshots
        self.statistics = statistics
        self.reporter = reporter
        self.tell = tell
        self.watched = watched
        self.began = self.looked = time.monotonic()
        self.results: list[Evaluation] = []  # on rank 0, not yet reported
        self.reported: set[int] = set()  # steps
        self.has_met = False  # validation ranks
        self.sign = 0  # of life, the last that they showed
        self.heard = math.inf  # when it came
        self.hang = False  # they show none

    def on_start(self, run: Run) -> None:
        """Start the clock of `SECONDS_TO_COME`."""
        self.began = time.monotonic()

    def _after_start(self, run: Run) -> None:
        """Offer the snapshot that was skipped when the run stopped: a checkpoint came first."""
        if run.evaluation_is_due and not self.progress.stop_requested:
            self._offer(run)

    def on_step(self, run: Run) -> None:
        """Report new results, and offer a snapshot where one is due."""
        if self.progress.news:
            self._report(run)
        if run.evaluation_is_due and not self.progress.stop_requested:
            self._offer(run)
        if self.snapshots and time.monotonic() > self.looked + SECONDS_BETWEEN_LOOKS:
            self._look(run)

    def on_rollback(self, run: Run) -> None:
        """Forget results; `Best` removes the snapshots of later steps."""
        self.results = []
        self.reported.clear()

    def on_end(self, run: Run) -> None:
        """Wait for the last results. The last step needs a snapshot only where examples are held out."""
        self.progress.check_losses()
        if self.watched != "test":
            self._offer(run)
        with self.progress.aside("evaluation"):
            end, waits = time.monotonic() + SECONDS_FOR_LAST, True
            while waits:
                self.progress.watch.mark("validation")
                time.sleep(SECONDS_BETWEEN_LAST_LOOKS)
                waits = collectives.broadcast_object(self._is_awaited(end))  # first: the last look misses nothing
                self._look(run)
                self._report(run)
        if self.snapshots:
            for step in self.snapshots.pending():
                self.reporter.missing(step, "no validation rank has answered")

    def _is_awaited(self, end: float) -> bool:
        """Whether a result may still arrive; False on ranks other than 0."""
        if not self.snapshots or not self.snapshots.pending():
            return False
        now, may_come = time.monotonic(), not self.has_met and time.monotonic() < self.began + SECONDS_TO_COME
        return now < end and (may_come or self.snapshots.has_readers()) and not self.hang

    def _look(self, run: Run) -> None:
        if self.snapshots:
            self.looked = time.monotonic()
            self.has_met = self.has_met or self.snapshots.has_readers()
            self._listen(self.snapshots, run.settings.stall_seconds)
            self.results = [found for found in self.snapshots.results() if found.step not in self.reported]
            self.progress.has_news = bool(self.results)

    def _listen(self, snapshots: Snapshots, stall_seconds: float | None) -> None:
        """Warn where validation ranks show no sign of life. `stall_seconds`: None: `FLOOR`; 0: never."""
        sign, process = snapshots.sign_of_life()
        if self.has_met and (sign != self.sign or self.heard == math.inf):
            self.sign, self.heard, self.hang = sign, self.looked, False
        seconds = (FLOOR if stall_seconds is None else stall_seconds) * (PATIENCE if self.reported else FACTOR)
        if seconds and self.looked > self.heard + seconds and not self.hang and snapshots.has_readers():
            self.hang = True
            self.reporter.warn(
                f"the validation ranks hang: {process} has shown no progress for {seconds:.0f} s; training goes on, "
                "and evaluations of later steps are missing"
            )

    def _report(self, run: Run) -> None:
        """Report results on all ranks. A collective."""
        results = collectives.broadcast_object(self.results)
        self.results, self.progress.news, self.progress.has_news = [], False, False
        for found in results:
            if math.isfinite(found.loss):
                epoch = round(found.step / run.plan.steps_per_epoch, 4)
                self.reporter.evaluation(found.step, epoch, found.values, found.part, at_step=run.step)
                self.tell("on_evaluation", found)
            else:
                self.reporter.missing(found.step, f"its {found.part} loss is {found.loss}")
            self.reported.add(found.step)
            if self.snapshots:
                self.snapshots.discard(found.step)

    def _offer(self, run: Run) -> None:
        """Write a snapshot of this step, unless the step is evaluated. A collective, since ranks average statistics."""
        self.progress.check_losses()
        with self.progress.aside("evaluation"):
            self.statistics.average(run.step)
            if self.snapshots and run.step not in self.reporter.evaluated[self.watched]:
                with _told(self.reporter, f"step {run.step} is not evaluated: its snapshot cannot be written"):
                    for step in self.snapshots.offer(run.step):
                        self.reporter.missing(step, f"no validation rank has taken it, and step {run.step} replaces it")


class Best(Callback):
    """Keeps the weights of the best evaluation, and ends a run by --early-stopping."""

    def __init__(
        self,
        progress: Progress,
        snapshots: Snapshots | None,
        reporter: Reporter,
        watched: str,
        results: dict[str, Any],
    ) -> None:
        """`snapshots`, `watched`: as for `Beside`; `results`: of `Summariser`."""
        self.progress = progress
        self.snapshots = snapshots
        self.reporter = reporter
        self.watched = watched
        self.results = results
        self.best: Evaluation | None = None
        self.newest: Evaluation | None = None
        self.evaluated: set[int] = set()  # steps

    def on_start(self, run: Run) -> None:
        """Continue from the recorded evaluations, which rank 0 broadcasts."""
        if self.snapshots:
            self.best = self.snapshots.best()
            self.evaluated = set(self.reporter.evaluated[self.watched])
        self.best, self.evaluated = collectives.broadcast_object((self.best, self.evaluated))
        self._end_where_due(run)

    @property
    def since(self) -> int:
        """Number of evaluations since the best one."""
        return sum(step > self.best.step for step in self.evaluated) if self.best else 0

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Compare with the best one so far. All ranks have the same two, and decide the same."""
        if evaluation.part != self.watched:
            return
        # The result of validation ranks may come after that of a later step.
        if self.newest is None or evaluation.step >= self.newest.step:
            self.newest = evaluation
        self.evaluated.add(evaluation.step)
        if self.best is not None and _merit(evaluation) <= _merit(self.best):
            self._end_where_due(run)
            return
        self.best = evaluation
        if self.snapshots:
            with _told(self.reporter, f"the best weights, of step {evaluation.step}, are not kept"):
                self.snapshots.keep(evaluation, run.step)

    def on_rollback(self, run: Run) -> None:
        """Forget evaluations of later steps."""
        self.progress.ends_early = ""
        if self.newest and self.newest.step > run.step:
            self.newest = None
        if self.snapshots:
            self.snapshots.go_back(run.step)
        self.on_start(run)

    def on_end(self, run: Run) -> None:
        """Put the best and the newest evaluation into the summary, and remove all other snapshots."""
        for name, found in (("best", self.best), ("newest", self.newest)):
            if found:
                self.results[name] = {"step": found.step, f"{self.watched}_accuracy": found.plain_accuracy}
        if self.snapshots:
            self.snapshots.close()

    def _end_where_due(self, run: Run) -> None:
        patience, is_last = run.settings.early_stopping, run.step == run.total_steps
        if patience and self.best and self.since >= patience and not is_last and not self.progress.ends_early:
            self.progress.ends_early = (
                f"{self.since} evaluations in a row have no higher {self.watched} accuracy than "
                f"{self.best.plain_accuracy:.2%} of step {self.best.step} (--early-stopping {patience})"
            )
            self.reporter.say(f"step {run.step} is the last one: {self.progress.ends_early}")


def _merit(evaluation: Evaluation) -> tuple[float, int]:
    return evaluation.plain_accuracy, -evaluation.step  # the first of equal accuracies counts


@contextlib.contextmanager
def _told(reporter: Reporter, what: str) -> Iterator[None]:
    """Warn if the block cannot write its files, and continue: training does not depend on them."""
    try:
        yield
    except (OSError, tf.errors.OpError) as failure:
        reporter.warn(f"{what}: {reason_of(failure)}")
