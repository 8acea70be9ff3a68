"""Compares the ranks' variables, bit for bit, every --check-sync-every steps and before each checkpoint."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.errors import OUT_OF_SYNC, TrainingError
from hvd_cifar.fields import MOST_STEPS
from hvd_cifar.training.callbacks import Callback, Run


class Settings(fields.Settings):
    check_sync_every: int = Field(500, ge=0, le=MOST_STEPS)
    """Steps between checks that weights and optimizer are the same on all ranks, bit for bit; the run ends where they
    differ. Ranks also check after the first step, before each checkpoint and at the end; 0: only before checkpoints and
    at the end."""


def make(run: Run) -> Callback:
    return ReplicaCheck(run.options(Settings).check_sync_every)


class ReplicaCheck(Callback):
    """Compares the ranks' variables, also after the first step: a net or optimizer that lets ranks differ shows there.

    TrainingError on every rank, where they differ.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.checked_step = -1  # the step of the last comparison

    def on_step(self, run: Run) -> None:
        is_first = self.every > 0 and run.step == run.progress.first_step + 1
        if is_first or run.is_due(self.every):
            self._check(run, with_own=False)

    def before_checkpoint(self, run: Run) -> None:
        self._check(run, with_own=True)  # the ranks have just averaged the variables that differ between steps

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        summary["replicas_identical"] &= self.checked_step == run.step

    def _check(self, run: Run, with_own: bool) -> None:
        from hvd_cifar.distributed.proof import find_divergence

        run.progress.check_losses()
        with run.progress.clock.paused():
            found = find_divergence(run.state.replicated(with_own))
            if found is not None:
                path, difference = found
                own = set(map(id, run.state.own))
                advice = ""
                if path in {v.path for v in run.model.non_trainable_variables if id(v) not in own}:
                    advice = "; if its layer changes it by a rank's own examples, name it moving_mean"
                raise TrainingError(f"{OUT_OF_SYNC} after step {run.step}: {difference}; {run.progress.kept}{advice}")
            self.checked_step = run.step
