"""From time stamps of steps to images per second, and from these to ratios between sides. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Stamp(NamedTuple):
    """A number of finished steps, and when it was seen, in seconds of a monotonic clock."""

    seconds: float
    step: int


class Spread(NamedTuple):
    """The median, the quartiles and the size of a sample."""

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
    """
    steps = stamps[-1].step - stamps[0].step
    return steps * images_per_step / (stamps[-1].seconds - stamps[0].seconds)


def spread(values: Sequence[float]) -> Spread:
    """The median and the quartiles; of fewer than three values, the least and the greatest."""
    if len(values) < 3:
        return Spread(min(values), statistics.median(values), max(values), len(values))
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(low, middle, high, len(values))


def paired(values: Sequence[float], base: Sequence[float]) -> list[float]:
    """Each value divided by the one measured beside it, so that drift between repeats cancels."""
    return [value / other for value, other in zip(values, base, strict=True)]


def table(rates: Mapping[str, Mapping[str, Sequence[float]]], *bases: str) -> str:
    """Markdown, a row a side: images/s, the share of them that it keeps on a slower link, and ratios.

    A share is relative to the side's own rate without a limit. A ratio is relative to the rate of one of `bases`, on
    the same link and, for slower links, without a limit. Both compare rates of the same repeat.

    `rates`: by the side's name and by the link, images/s in each repeat. The first link has no limit.
    """
    first, *slower = next(iter(rates.values()))
    suffixes = {first: "", **{link: f" at {link}" for link in slower}}
    columns = [f"images/s{suffix}" for suffix in suffixes.values()]
    columns += [f"share kept at {link}" for link in slower]
    columns += [f"ratio to {base}{suffix}" for base in bases for suffix in suffixes.values()]
    columns += [f"at {link} to {base} without a limit" for base in bases for link in slower]
    lines = [f"| side | {' | '.join(columns)} | n |", "|---" * (len(columns) + 2) + "|"]
    for name, of_link in rates.items():
        found = [of_link[link] for link in suffixes]
        found += [paired(of_link[link], of_link[first]) for link in slower]
        found += [paired(of_link[link], rates[base][link]) for base in bases for link in suffixes]
        found += [paired(of_link[link], rates[base][first]) for base in bases for link in slower]
        lines.append(f"| {name} | {' | '.join(str(spread(values)) for values in found)} | {len(of_link[first])} |")
    return "\n".join(lines)
