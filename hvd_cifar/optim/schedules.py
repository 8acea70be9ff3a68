"""The learning rate and the image size as pure functions of the step."""

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

    def __call__(self, progress: float) -> float:
        """The factor after a fraction of the steps."""
        return 1.0 - progress


def cosine(progress: float) -> float:
    """Half a cosine from 1 to 0 (Loshchilov and Hutter 2017); `progress` is the fraction of finished steps."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


# A recipe's schedule after the warm-up. A function takes the fraction of finished steps, 0 to 1, and returns the factor
# of the learning rate.
Decay = Staircase | Callable[[float], float]


@dataclass(frozen=True)
class Schedule:
    """The learning rate of a run: a linear warm-up, then a staircase or a function."""

    base: float  # at the start of the warm-up (Goyal et al. 2017, section 2.2)
    peak: float  # after it
    warmup_steps: int  # 0: none
    decay_steps: tuple[int, ...]  # at which the rate is multiplied by `decay`, ascending
    decay: float
    shape: Callable[[float], float] | None = None  # factor by the finished fraction of `shape_steps`; None: none
    shape_steps: int = 1

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` finished ones."""
        rate = self.peak
        if step < self.warmup_steps:
            rate = self.base + (self.peak - self.base) * step / self.warmup_steps
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
        if self.shape is not None:
            factors = ", ".join(f"{float(self.shape(part / 4)):{digits or '.17g'}}" for part in range(5))
            rise = f"{rise}, times {factors} at the quarters of {self.shape_steps} steps"
        if not self.decay_steps:
            return rise
        return f"{rise}, times {self.decay:g} at steps {', '.join(map(str, self.decay_steps))}"


@dataclass(frozen=True)
class ImageSizes:
    """Progressive resizing: image sizes, each for an equal part of a run's steps."""

    sides: tuple[int, ...]  # heights of images in pixels, one for each part; widths follow in proportion
    total_steps: int  # of all epochs, even where --max-steps ends the run earlier

    def __call__(self, step: int) -> int:
        """The size for the next step after `step` finished ones."""
        return self.sides[min(step * len(self.sides) // self.total_steps, len(self.sides) - 1)]
