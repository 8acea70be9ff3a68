"""The time of an all-reduce as a formula, and its numbers from measurements. Pure functions.

A ring all-reduce of S bytes over p ranks takes 2 (p - 1) messages, one after the other, of S / p bytes each:

    seconds = start + 2 (p - 1) alpha + 2 (p - 1) / p * S * beta

alpha is the time of a message without content, beta the time of a byte (Patarasuk, Yuan: Bandwidth optimal all-reduce
algorithms for clusters of workstations, 2009). `start` is what comes once, whatever the ranks: Horovod looks for work
at intervals (HOROVOD_CYCLE_TIME) and lets the ranks agree on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

STEPS = 50  # of a fit at most, so that rounding cannot keep it from ending


@dataclass(frozen=True)
class Point:
    """One measurement: an all-reduce of so many bytes over so many ranks."""

    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The formula's numbers, and how far the measurements are from it.

    start, alpha: in seconds. beta: in seconds a byte; 0 where no measurement was long enough to show it.
    alpha_known: False where the measurements could not tell alpha from `start`, which then holds both.
    errors: |predicted / measured - 1| of the measurements, ascending.
    """

    start: float
    alpha: float
    beta: float
    errors: tuple[float, ...] = ()
    alpha_known: bool = True

    @property
    def median_error(self) -> float:
        """Of |predicted / measured - 1|; 0 without measurements."""
        return float(np.median(self.errors)) if self.errors else 0.0

    @property
    def largest_error(self) -> float:
        """Of |predicted / measured - 1|; 0 without measurements."""
        return max(self.errors, default=0.0)

    def seconds(self, ranks: int, size: float) -> float:
        """The time of an all-reduce of `size` bytes; 0 for one rank."""
        if ranks == 1:
            return 0.0
        return self.start + messages(ranks) * self.alpha + traffic(ranks) * size * self.beta


def messages(ranks: int) -> int:
    """Messages that a ring all-reduce sends one after the other: 2 (p - 1)."""
    return 2 * (ranks - 1)


def traffic(ranks: int) -> float:
    """Bytes that each rank sends for each byte to be reduced: 2 (p - 1) / p. Bus bandwidth is this times S / t."""
    return 2 * (ranks - 1) / ranks


def fit(points: Sequence[Point], with_start: bool, alpha: float | None = None) -> Fit | None:
    """Least squares of log(predicted / measured), with no number below 0.

    Of ratios, since times go from microseconds to seconds and all sizes count alike; and of their logarithms, for which
    twice as long is as wrong as half as long. Of predicted / measured - 1, noise alone makes every network look faster:
    a time predicted as next to nothing costs no more than 1.

    Args:
        with_start: whether there may be a `start`. Measurements of one number of ranks alone cannot tell it from
            alpha: alpha is then taken as 0, unless it is given, since a cycle of Horovod's is a hundred messages long.
        alpha: taken as it is, where it is known from elsewhere.

    Returns:
        None without measurements of two sizes on two ranks or more.
    """
    points = [p for p in points if p.ranks > 1]
    if len({p.bytes for p in points}) < 2:
        return None
    alpha_known = not with_start or alpha is not None or len({p.ranks for p in points}) > 1
    seconds = np.array([p.seconds for p in points])
    columns = {
        "start": np.ones(len(points)),
        "alpha": np.array([messages(p.ranks) for p in points], float),
        "beta": np.array([traffic(p.ranks) * p.bytes for p in points]),
    }
    known = dict.fromkeys(columns, 0.0)
    unknown = ["beta"]
    if alpha is not None:
        known["alpha"] = alpha
    elif alpha_known:
        unknown.append("alpha")
    if with_start:
        unknown.append("start")
    found = _by_ratio([columns[name] for name in unknown], columns["alpha"] * known["alpha"], seconds)
    known |= dict(zip(unknown, found, strict=True))
    result = Fit(known["start"], known["alpha"], known["beta"])
    errors = sorted(abs(result.seconds(p.ranks, p.bytes) / p.seconds - 1) for p in points)
    return replace(result, errors=tuple(errors), alpha_known=alpha_known)


def _by_ratio(
    columns: Sequence[NDArray[np.float64]], fixed: NDArray[np.float64], seconds: NDArray[np.float64]
) -> list[float]:
    """Coefficients of the columns, none below 0, with the least squares of log((fixed + their sum) / seconds).

    Gauss and Newton's steps from the least squares of relative errors, halved until they lead downwards.
    """

    def predicted(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return fixed + np.stack(columns, axis=1) @ values

    def badness(values: NDArray[np.float64]) -> float:
        times = predicted(values)
        return float(np.square(np.log(times / seconds)).sum()) if (times > 0).all() else math.inf

    best = np.array(_non_negative([column / seconds for column in columns], 1 - fixed / seconds))
    for _ in range(STEPS):
        if badness(best) == math.inf:
            break
        times = predicted(best)
        target = np.log(seconds / times) + 1 - fixed / times
        aim = np.array(_non_negative([column / times for column in columns], target))
        tries = (best + (aim - best) / 2**halvings for halvings in range(10))
        better = next((values for values in tries if badness(values) < badness(best)), None)
        if better is None:
            break
        best = better
    return [float(value) for value in best]


def _non_negative(columns: Sequence[NDArray[np.float64]], target: NDArray[np.float64]) -> list[float]:
    """Least squares with no coefficient below 0: of all choices of columns the best one, as there are few columns."""
    best, coefficients = float(target @ target), [0.0] * len(columns)
    for count in range(1, len(columns) + 1):
        for chosen in itertools.combinations(range(len(columns)), count):
            matrix = np.stack([columns[i] for i in chosen], axis=1)
            scale = np.linalg.norm(matrix, axis=0)  # columns differ by the size of a byte's time
            values, *_ = np.linalg.lstsq(matrix / scale, target, rcond=None)
            rest = target - (matrix / scale) @ values
            if (values >= 0).all() and rest @ rest < best:
                best = float(rest @ rest)
                coefficients = [0.0] * len(columns)
                for i, value in zip(chosen, values / scale, strict=True):
                    coefficients[i] = float(value)
    return coefficients


def fits_by_way(measured: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    """alpha, beta and, for Horovod, the start, from the measurements of each way ("horovod", "mpi")."""
    mpi = fit(measured.get("mpi", ()), with_start=False)
    points = measured.get("horovod", ())
    # Of one number of ranks Horovod's start cannot be told from its messages; MPI's are the same messages.
    single = len({p.ranks for p in points}) == 1
    horovod = fit(points, with_start=True, alpha=mpi.alpha if mpi and single else None)
    return {way: found for way, found in (("horovod", horovod), ("mpi", mpi)) if found is not None}


def end_of_overlapped(ready: Sequence[float], sizes: Sequence[int], fit: Fit, ranks: int) -> float:
    """When the last gradient is reduced, where the all-reduce runs beside the backward pass; in seconds.

    As Horovod does it: it looks for gradients `start` after the first one is ready or the last all-reduce has ended,
    and reduces all that are ready by then at once.

    Args:
        ready: when each gradient is ready, ascending, in seconds.
        sizes: bytes of each.
    """
    now, sent = 0.0, 0
    while sent < len(sizes):
        now = max(now, ready[sent]) + fit.start
        upto = sent
        while upto < len(sizes) and ready[upto] <= now:
            upto += 1
        now += fit.seconds(ranks, sum(sizes[sent:upto])) - fit.start
        sent = upto
    return now
