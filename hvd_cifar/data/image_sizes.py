"""Progressive resizing: the image size of each step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ImageSizes:
    """Image sizes, each for an equal part of a run's steps.

    Attributes:
        sides: heights of images in pixels, one for each part; widths follow in proportion.
        total_steps: of all epochs, even where --max-steps ends the run earlier.
    """

    sides: tuple[int, ...]
    total_steps: int

    def __call__(self, step: int) -> int:
        """The size for the next step after `step` finished ones."""
        return self.sides[min(step * len(self.sides) // self.total_steps, len(self.sides) - 1)]

    def parts(self, first: int, end: int) -> list[tuple[int, range]]:
        """Each side with its steps in range(first, end); `end` is at most `total_steps`."""
        edges = [-(-part * self.total_steps // len(self.sides)) for part in range(len(self.sides) + 1)]
        spans = zip(self.sides, edges, edges[1:], strict=False)
        return [(side, range(max(first, begin), min(end, stop))) for side, begin, stop in spans]

    def steps_like(self, step: int, first: int, end: int) -> float:
        """The steps in range(first, end) as a number of steps of the size after `step` finished ones, by pixels."""
        pixels = sum(side**2 * len(steps) for side, steps in self.parts(first, end))
        return pixels / self(step) ** 2
