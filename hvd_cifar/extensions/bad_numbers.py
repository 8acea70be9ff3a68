"""--on-nan: what a run does where a loss, a weight or a value of the optimizer is infinite or NaN.

All ranks have the same loss, weights and optimizer, so all act at the same step without a message.
"""

from __future__ import annotations

from typing import Any, Literal

from hvd_cifar import fields
from hvd_cifar.errors import DIVERGED, Diverged
from hvd_cifar.training.callbacks import Callback, Run

RATE_FACTOR = 0.5  # multiplies the learning rate at each rollback
MOST_ROLLBACKS = 3


class Settings(fields.Settings):
    on_nan: Literal["stop", "rollback"] = "stop"
    """What to do if the loss or a weight is not finite. stop: end the run; rollback: continue from the newest good
    checkpoint with a lower learning rate. See docs/reliability.md."""


def make(run: Run) -> Callback:
    return Rollback() if run.options(Settings).on_nan == "rollback" else BadNumbers()


class BadNumbers(Callback):
    """Keeps the lower learning rate of earlier processes, whatever --on-nan says now; stops at a bad number."""

    def on_build(self, run: Run) -> None:
        self.factor = run.state.number("rate_factor", 1.0)

    def on_start(self, run: Run) -> None:
        run.progress.rate_factor = float(self.factor.numpy())

    def before_save(self, run: Run) -> None:
        self.factor.assign(run.progress.rate_factor)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        summary["learning_rate_factor"] = run.progress.rate_factor


class Rollback(BadNumbers):
    """--on-nan rollback: returns the run to a checkpoint, in the same processes, with a lower learning rate."""

    def before_steps(self, run: Run) -> None:
        run.save()  # so that there is a checkpoint to go back to

    def on_diverged(self, run: Run, failure: Diverged) -> bool:
        done, from_step = int(run.state.rollbacks.numpy()), run.step
        if done >= MOST_ROLLBACKS:
            failure.args = (f"{failure}; the run went back {MOST_ROLLBACKS} times before",)
            return False
        factor = run.progress.rate_factor * RATE_FACTOR
        with run.aside("restart"):
            path = run.go_back(failure.weights_step)
        if path is None:
            return False
        run.state.rollbacks.assign(done + 1)
        run.progress.rate_factor = factor
        # Without DIVERGED, at which the launcher would not restart the run.
        reason = str(failure).partition(";")[0].removeprefix(DIVERGED).removeprefix(" with ").removeprefix(": ")
        run.warn(
            f"{reason}: rollback {done + 1} of {MOST_ROLLBACKS} from step {from_step} to {path.name}; "
            f"the learning rate is {factor:g} times the schedule's from here on"
        )
        run.reporter.mark("rollback", step=run.step)
        run.record("rollback", step=run.step, from_step=from_step, learning_rate_factor=factor)
        run.tell("on_rollback")
        return True
