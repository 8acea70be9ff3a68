"""How much longer a run takes, printed once its speed is known, and what shorter runs would reach."""

from __future__ import annotations

from collections.abc import Mapping

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.training.callbacks import STEPS_LEFT_OUT, Callback, Logger
from hvd_cifar.training.plan import Plan
from hvd_cifar.training.progress import Run


class Forecast(Callback):
    """Prints once how much longer the run takes, at the first log line without the slow first steps."""

    def __init__(self, logger: Logger, reporter: Reporter, sizes: ImageSizes, shorter: Mapping[float, float]) -> None:
        """`shorter`: as `Recipe.shorter`; empty for a data set on which it was not measured."""
        self.logger = logger
        self.reporter = reporter
        self.sizes = sizes
        self.shorter = shorter
        self.said = False

    def on_log(self, run: Run) -> None:
        """Print the forecast once the speed of the last steps is representative."""
        begin, rate = self.logger.rates[-1]
        if self.said or begin < self.logger.progress.first_step + STEPS_LEFT_OUT or run.step == run.total_steps:
            return
        self.said = True
        shorter = {epochs: found for epochs, found in self.shorter.items() if epochs < (run.settings.epochs or 0)}
        self.reporter.say(forecast(run.plan, self.sizes, run.step, rate, shorter))


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
