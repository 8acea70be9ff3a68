"""Gradient norms, their moving mean kept in checkpoints: `train --callbacks examples/my_extension.py:GradientNorm`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvd_cifar import Callback, Run, StepObserver

DECAY = 0.9  # per step; the mean begins at 0, and is too low for some twenty steps


class Norm(StepObserver):
    """Adds the norm of each step's gradient, summed over the ranks, to the mean."""

    def __init__(self, mean: Any) -> None:
        self.mean = mean

    def on_reduced(self, gradients: Sequence[Any]) -> None:
        norm = tf.cast(tf.linalg.global_norm(gradients), tf.float64)
        self.mean.assign(DECAY * self.mean.value + (1 - DECAY) * norm)


class GradientNorm(Callback):
    """Its mean is the same on all ranks, so the ranks also compare it."""

    def on_build(self, run: Run) -> None:
        self.mean = run.state.number("gradient_norm", 0.0)
        run.observe(Norm(self.mean))

    def on_log(self, run: Run) -> None:
        mean = float(self.mean.numpy())
        run.record("gradient_norm", step=run.step, mean=mean)  # in metrics.jsonl
        run.reporter.show(run.step, {"gradient_norm": mean})  # in TensorBoard

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        summary["gradient_norm"] = float(self.mean.numpy())
