"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Staircase:
    """The learning rate is multiplied by `factor` at given numbers of training examples.

    Attributes:
        examples: the numbers of examples, ascending.
        full_examples: length of the run that `examples` are for. They scale with a run's length; None: they do not.
        factor: factor at each of them.
    """

    examples: tuple[int, ...]
    full_examples: int | None = None
    factor: float = 0.1


@dataclass(frozen=True)
class ToZero:
    """The learning rate falls linearly, from its peak at step 0 to zero at the last step of all epochs."""


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter 2017); `progress` is the fraction of finished steps."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# A recipe's schedule after the warm-up. A function takes the fraction of finished steps, 0 to 1, and returns the factor
# of the learning rate.
Decay = Staircase | ToZero | Callable[[float], float]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run: a linear warm-up, then a staircase, a linear decay to zero, or a function.

    Attributes:
        base: learning rate at the start of the warm-up.
        peak: learning rate after the warm-up, before the first decay.
        warmup_steps: steps of the warm-up (Goyal et al. 2017, section 2.2); 0: none.
        decay_steps: the steps at which the rate is multiplied by `decay`, ascending.
        decay: factor, such as 0.1.
        zero_at: the step at which a linear decay from the peak at step 0 reaches zero; None: no linear decay.
        shape: factor as a function of the finished fraction of `shape_steps`; None: no such factor.
        shape_steps: steps over which `shape` goes from 0 to 1.
    """

    base: float
    peak: float
    warmup_steps: int
    decay_steps: tuple[int, ...]
    decay: float
    zero_at: int | None = None
    shape: Callable[[float], float] | None = None
    shape_steps: int = 1

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` finished ones."""
        rate = self.peak
        if step < self.warmup_steps:
            rate = self.base + (self.peak - self.base) * step / self.warmup_steps
        if self.zero_at is not None:
            rate *= max(0.0, 1.0 - step / self.zero_at)
        if self.shape is not None:
            rate *= float(self.shape(min(1.0, step / self.shape_steps)))  # it may be a number of NumPy or TensorFlow
        return rate * self.decay ** sum(1 for boundary in self.decay_steps if step >= boundary)

    def __str__(self) -> str:
        return self._describe("g")

    @property
    def exact(self) -> str:
        """The schedule in words with every digit, for comparisons."""
        return self._describe("")

    def _describe(self, digits: str) -> str:
        rise = f"{self.peak:{digits}}"
        if self.warmup_steps:
            rise = f"{self.base:{digits}} to {rise} over {self.warmup_steps} steps"
        if self.zero_at is not None:
            rise = f"{rise}, in a straight line to 0 at step {self.zero_at}"
        if self.shape is not None:
            factors = ", ".join(f"{float(self.shape(part / 4)):{digits or '.17g'}}" for part in range(5))
            rise = f"{rise}, times {factors} at the quarters of {self.shape_steps} steps"
        if not self.decay_steps:
            return rise
        return f"{rise}, times {self.decay:g} at steps {', '.join(map(str, self.decay_steps))}"
