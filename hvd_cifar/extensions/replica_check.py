"""Compares the ranks' variables, bit for bit, every --check-sync-every steps and before each checkpoint."""

from __future__ import annotations

import time
from typing import Any

from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.errors import OUT_OF_SYNC, TrainingError
from hvd_cifar.fields import MOST_STEPS
from hvd_cifar.training.callbacks import Callback, Run


class Settings(fields.Settings):
    """Options of this extension."""

    check_sync_every: int = Field(
        500,
        ge=0,
        le=MOST_STEPS,
        description="Steps between checks that weights and optimizer are the same on all ranks, bit for bit; the run "
        "ends where they differ. Ranks also check after the first step, before each checkpoint and at the end; 0: only "
        "before checkpoints and at the end.",
    )


def make(run: Run) -> Callback:
    """The check."""
    return ReplicaCheck(run.options(Settings).check_sync_every)


class ReplicaCheck(Callback):
    """Compares the ranks' variables.

    The first step of a process is followed by a comparison, since a net or optimizer that lets ranks drift apart shows
    there.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self.checked_step = -1  # the step of the last comparison

    def on_build(self, run: Run) -> None:
        """Count the seconds of comparisons."""
        self.seconds = run.state.number("check_seconds", 0.0, "root")

    def on_step(self, run: Run) -> None:
        """Compare where it is due."""
        is_first = self.every > 0 and run.step == run.progress.first_step + 1
        if is_first or run.is_due(self.every):
            self.check(run, everything=False)

    def before_checkpoint(self, run: Run) -> None:
        """Compare all that the checkpoint will hold."""
        self.check(run, everything=True)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        """Say whether all variables are the same at the end."""
        summary["replicas_identical"] &= self.checked_step == run.step
        summary["sync_check_seconds"] = round(float(self.seconds.numpy()), 6)

    def check(self, run: Run, everything: bool) -> None:
        """Compare now.

        Args:
            everything: compare also the variables that differ between steps, which the ranks have just averaged.

        Raises:
            TrainingError: on every rank, where they differ.
        """
        from hvd_cifar.distributed.proof import find_divergence

        run.progress.check_losses()
        with run.progress.clock.paused():
            began = time.perf_counter()
            found = find_divergence(run.state.replicated(with_own=everything))
            if found is not None:
                path, difference = found
                own = set(map(id, run.state.own))
                advice = ""
                if path in {v.path for v in run.model.non_trainable_variables if id(v) not in own}:
                    advice = "; if its layer changes it by a rank's own examples, name it moving_mean"
                raise TrainingError(f"{OUT_OF_SYNC} after step {run.step}: {difference}; {run.progress.kept}{advice}")
            self.checked_step = run.step
            self.seconds.assign_add(time.perf_counter() - began)
