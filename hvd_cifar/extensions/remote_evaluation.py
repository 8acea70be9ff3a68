"""Evaluation by other ranks while these train (--validation-ranks)."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from hvd_cifar.runtime.watch import FACTOR, FLOOR, PATIENCE
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.evaluate import Evaluation
    from hvd_cifar.training.snapshots import Snapshots

FLAG = "news"  # 1 on rank 0 if results have arrived
SECONDS_BETWEEN_LOOKS = 1.0  # for results, while training
SECONDS_BETWEEN_LAST_LOOKS = 0.2  # after the last step
SECONDS_TO_COME = 300.0  # for validation ranks to start, from the first step on
SECONDS_FOR_LAST = 600.0  # for missing results, after the last step
UNREAD = "results of validation ranks cannot be read"


def make(run: Run) -> Callback | None:
    return RemoteEvaluation() if run.world.beside else None


class RemoteEvaluation(Callback):
    """Offers snapshots where an evaluation is due, and reports results.

    Only rank 0 reads files. It tells the others with a step's loss that results have arrived, and broadcasts them.
    """

    def __init__(self) -> None:
        self.snapshots: Snapshots | None = None  # on rank 0
        self.began = self.looked = time.monotonic()
        self.results: list[Evaluation] = []  # on rank 0, not yet reported
        self.reported: set[int] = set()  # steps
        self.has_met = False  # validation ranks
        self.sign = 0  # of life, the last that they showed
        self.heard = math.inf  # when it came
        self.hang = False  # they show none

    def on_build(self, run: Run) -> None:
        """Leave evaluations during training to the other job. Rank 0 tells the others of results with a flag."""
        run.is_evaluated_here = False
        run.progress.own_flags[FLAG] = 0.0

    def on_restore(self, run: Run) -> None:
        from hvd_cifar.training.snapshots import open_snapshots

        self.snapshots = open_snapshots(run)

    def on_start(self, run: Run) -> None:
        self.began = time.monotonic()

    def before_steps(self, run: Run) -> None:
        """Offer the snapshot that was skipped when the run stopped: a checkpoint came first."""
        if run.evaluation_is_due and not run.progress.stop_requested:
            self._offer(run)

    def on_step(self, run: Run) -> None:
        if run.progress.flags[FLAG] > 0:
            self._report(run)
        if run.evaluation_is_due and not run.progress.stop_requested:
            self._offer(run)
        if self.snapshots and time.monotonic() > self.looked + SECONDS_BETWEEN_LOOKS:
            self._look(run)

    def on_rollback(self, run: Run) -> None:
        """Forget results; `best_weights` removes the snapshots of later steps."""
        self._forget(run)
        self.reported.clear()

    def on_end(self, run: Run) -> None:
        """Wait for the last results. The last step needs a snapshot only where examples are held out."""
        run.progress.check_losses()
        if run.watched != "test":
            self._offer(run)
        with run.aside("evaluation"):
            end, waits = time.monotonic() + SECONDS_FOR_LAST, True
            while waits:
                run.progress.watch.mark("validation")
                time.sleep(SECONDS_BETWEEN_LAST_LOOKS)
                waits = run.ranks.broadcast(self._is_awaited(run, end))  # first: the last look misses nothing
                self._look(run)
                self._report(run)
        with run.files_may_fail(UNREAD):
            for step in self.snapshots.pending() if self.snapshots else ():
                run.reporter.missing(step, "no validation rank has answered")

    def _is_awaited(self, run: Run, end: float) -> bool:
        """Whether a result may still arrive; False on ranks other than 0."""
        now = time.monotonic()
        with run.files_may_fail(UNREAD):
            if self.snapshots and self.snapshots.pending() and now < end and not self.hang:
                may_come = not self.has_met and now < self.began + SECONDS_TO_COME
                return may_come or self.snapshots.has_readers()
        return False

    def _forget(self, run: Run) -> None:
        """Have no results: none to tell the other ranks of, and none that they have heard of."""
        self.results = []
        run.progress.own_flags[FLAG] = run.progress.flags[FLAG] = 0.0

    def _look(self, run: Run) -> None:
        if self.snapshots:
            self.looked = time.monotonic()
            with run.files_may_fail(UNREAD):
                self.has_met = self.has_met or self.snapshots.has_readers()
                self.results = [found for found in self.snapshots.results() if found.step not in self.reported]
                self._listen(run, self.snapshots)
            run.progress.own_flags[FLAG] = float(bool(self.results))

    def _listen(self, run: Run, snapshots: Snapshots) -> None:
        """Warn where validation ranks show no sign of life for some time-outs of --stall-seconds."""
        sign, _, process = snapshots.sign_of_life()
        if self.has_met and (sign != self.sign or self.heard == math.inf):
            self.sign, self.heard, self.hang = sign, self.looked, False
        limit = run.settings.stall_seconds  # None: `FLOOR`; 0: never
        seconds = (FLOOR if limit is None else limit) * (PATIENCE if self.reported else FACTOR)
        if seconds and self.looked > self.heard + seconds and not self.hang and snapshots.has_readers():
            self.hang = True
            run.warn(
                f"the validation ranks hang: {process} has shown no progress for {seconds:.0f} s; training goes "
                "on, and evaluations of later steps are missing"
            )

    def _report(self, run: Run) -> None:
        """Report results on all ranks. A collective."""
        results = run.ranks.broadcast(self.results)
        self._forget(run)
        for found in results:
            if math.isfinite(found.loss):
                epoch = round(found.step / run.plan.steps_per_epoch, 4)
                run.evaluation = found
                run.reporter.evaluation(found.step, epoch, found.values, found.part, at_step=run.step)
                run.tell("on_evaluation", found)
            else:
                run.reporter.missing(found.step, f"its {found.part} loss is {found.loss}")
            self.reported.add(found.step)
            if self.snapshots:
                self.snapshots.discard(found.step)

    def _offer(self, run: Run) -> None:
        """Write a snapshot of this step, unless the step is evaluated. A collective, since ranks average statistics."""
        run.progress.check_losses()
        with run.aside("evaluation"):
            run.state.average(run.step)
            if self.snapshots and run.step not in run.reporter.evaluated[run.watched]:
                with run.files_may_fail(f"step {run.step} is not evaluated: its snapshot cannot be written"):
                    for step in self.snapshots.offer(run.step):
                        run.reporter.missing(step, f"no validation rank has taken it, and step {run.step} replaces it")
