"""The learning rate as a pure function of the step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """After a linear warm-up a staircase, or a straight line to zero.

    Attributes:
        base: learning rate of one rank's batch, where the warm-up begins.
        peak: learning rate after the warm-up, before the first decay; base times the number of ranks, if it is scaled.
        warmup_steps: steps of the warm-up (Goyal et al. 2017, section 2.2); 0: none.
        decay_steps: the steps at which the rate is multiplied by `decay`, ascending.
        decay: factor, such as 0.1.
        zero_at: the step at which a straight line from the peak at step 0 reaches zero; None: there is none.
    """

    base: float
    peak: float
    warmup_steps: int
    decay_steps: tuple[int, ...]
    decay: float
    zero_at: int | None = None

    def __call__(self, step: int) -> float:
        """The learning rate of the step that follows `step` finished ones."""
        rate = self.peak
        if step < self.warmup_steps:
            rate = self.base + (self.peak - self.base) * step / self.warmup_steps
        if self.zero_at is not None:
            rate *= max(0.0, 1.0 - step / self.zero_at)
        return rate * self.decay ** sum(1 for boundary in self.decay_steps if step >= boundary)

    def __str__(self) -> str:
        return self._describe("g")

    @property
    def exact(self) -> str:
        """The same in words with every digit, to be compared."""
        return self._describe("")

    def _describe(self, digits: str) -> str:
        rise = f"{self.peak:{digits}}"
        if self.warmup_steps:
            rise = f"{self.base:{digits}} to {rise} over {self.warmup_steps} steps"
        if self.zero_at is not None:
            rise = f"{rise}, in a straight line to 0 at step {self.zero_at}"
        if not self.decay_steps:
            return rise
        return f"{rise}, times {self.decay:g} at steps {', '.join(map(str, self.decay_steps))}"


def linear_scaling(base: float, batches_per_step: int) -> float:
    """The linear scaling rule: k times the batch, k times the learning rate (Goyal et al. 2017, section 2.1)."""
    return base * batches_per_step
