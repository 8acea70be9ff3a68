"""From time stamps of steps to images per second, and from these to ratios between sides. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple


class Stamp(NamedTuple):
    """When it became known that so many steps were done; seconds of a clock that never jumps."""

    seconds: float
    step: int


class Spread(NamedTuple):
    """A sample in short: the median, the quartiles, and of how many."""

    low: float
    middle: float
    high: float
    n: int

    def __str__(self) -> str:
        digits = 0 if self.middle >= 100 else 3
        return f"{self.middle:,.{digits}f} ({self.low:,.{digits}f} to {self.high:,.{digits}f})"


def rate(stamps: Sequence[Stamp], images_per_step: float) -> float:
    """Images per second between the first stamp and the last.

    What lies before the first stamp is left out: a step that was cut by a pause, and caches that others have filled.

    Raises:
        ValueError: for fewer than two stamps, or where no step was done between them.
    """
    if len(stamps) < 2 or stamps[-1].step <= stamps[0].step:
        raise ValueError(f"a rate takes two stamps with steps between them, not {list(stamps)}")
    steps = stamps[-1].step - stamps[0].step
    return steps * images_per_step / (stamps[-1].seconds - stamps[0].seconds)


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles; of fewer than three values, the least and the greatest."""
    if len(values) < 3:
        return Spread(min(values), statistics.median(values), max(values), len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high, len(values))


def paired(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each value by the one that was measured beside it, so that what drifts between repeats cancels."""
    return [value / other for value, other in zip(values, base, strict=True)]


def table(rates: dict[str, list[float]], *bases: str) -> str:
    """Markdown: a row a side, with its images/s and its ratio to each of `bases` in the same repeat.

    Args:
        rates: by the side's name, images/s in each repeat, all of one length.
    """
    lines = [f"| side | images/s | {' | '.join(f'ratio to {base}' for base in bases)} | n |"]
    lines.append("|---" * (len(bases) + 3) + "|")
    for name, values in rates.items():
        ratios = [str(spread(paired(values, rates[base]))) for base in bases]
        lines.append(f"| {name} | {spread(values)} | {' | '.join(ratios)} | {len(values)} |")
    return "\n".join(lines)
