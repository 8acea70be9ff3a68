"""How much longer a run takes, printed once its speed is known, and what shorter runs would reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hvd_cifar.data.image_sizes import ImageSizes
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
        measured = run.recipe.shorter if run.dataset == "cifar10" else {}  # on which the accuracies were measured
        shorter = {epochs: found for epochs, found in measured.items() if epochs < (run.settings.epochs or 0)}
        run.say(forecast(run.plan, run.work.sizes, run.step, rate, shorter))


def forecast(plan: Plan, sizes: ImageSizes, step: int, rate: float, shorter: Mapping[float, float]) -> str:
    """The line to print. It assumes that an image's time is proportional to its pixels.

    Args:
        plan: of the run.
        sizes: of the images, by step.
        step: finished global steps.
        rate: images/s of the last of them.
        shorter: accuracies, 0 to 1, by numbers of epochs to name.
    """

    def seconds(first: int, end: int, sizes: ImageSizes) -> float:
        return sizes.steps_like(step - 1, first, end) * plan.global_batch_size / rate

    parts = [f"about {roughly(seconds(step, plan.total_steps, sizes))} of training left"]
    for epochs, accuracy in shorter.items():
        steps = round(epochs * plan.steps_per_epoch)
        taken = seconds(0, steps, ImageSizes(sizes.sides, steps))
        parts.append(f"--epochs {epochs:g} reaches {accuracy:.0%} in {roughly(taken)}")
    return "; ".join(parts)


def roughly(seconds: float) -> str:
    """A time in about two digits, the precision of a forecast."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.0f} s"
