"""How much longer a run takes, printed once its speed is known."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cifar.optim.schedules import ImageSizes
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.plan import Plan

STEPS_LEFT_OUT = 10  # tracing and cold caches slow the first steps down


def make(run: Run) -> Callback:
    """The forecast."""
    return Forecast()


class Forecast(Callback):
    """Prints once how much longer the run takes, at the first log line without the slow first steps."""

    def __init__(self) -> None:
        self.said = False

    def on_log(self, run: Run) -> None:
        """Print the forecast once the speed of the last steps is representative."""
        begin, rate = run.progress.rates[-1]
        if self.said or begin < run.progress.first_step + STEPS_LEFT_OUT or run.step == run.total_steps:
            return
        self.said = True
        run.say(forecast(run.plan, run.work.sizes, run.step, rate))


def forecast(plan: Plan, sizes: ImageSizes, step: int, rate: float) -> str:
    """The line to print. It assumes that an image's time is proportional to its pixels.

    Args:
        plan: of the run.
        sizes: of the images, by step.
        step: finished global steps.
        rate: images/s of the last of them.
    """
    seconds = sizes.steps_like(step - 1, step, plan.total_steps) * plan.global_batch_size / rate
    return f"about {roughly(seconds)} of training left"


def roughly(seconds: float) -> str:
    """A time in about two digits, the precision of a forecast."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
