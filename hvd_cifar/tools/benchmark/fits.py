"""A formula for the time of an all-reduce, fitted to measurements. Pure functions.

A ring all-reduce of S bytes over p ranks takes 2 (p - 1) messages, one after the other, of S / p bytes each:

    seconds = start + 2 (p - 1) alpha + 2 (p - 1) / p * S * beta

alpha is the time of an empty message, beta the time of a byte (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms
for clusters of workstations, 2009). `start` does not depend on the ranks: Horovod looks for work at intervals
(HOROVOD_CYCLE_TIME), and its ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Point:
    """One measurement of an all-reduce: ranks, bytes of the message, seconds."""

    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The numbers of the formula, and its errors.

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

    Times go from microseconds to seconds, and with ratios all sizes have the same weight. With their logarithms, twice
    as long is as wrong as half as long. With predicted / measured - 1 a prediction of nearly 0 would cost no more than
    1, and noise would make every network look faster.

    Args:
        with_start: whether to fit a `start`. Measurements on one number of ranks cannot tell it from alpha: alpha is
            then 0, unless it is given, since a cycle of Horovod's takes as long as a hundred messages.
        alpha: known from other measurements; None: fitted.

    Returns:
        None without measurements of two sizes on two ranks or more.
    """
    points = [p for p in points if p.ranks > 1]
    if len({p.bytes for p in points}) < 2:
        return None
    alpha_known = not with_start or alpha is not None or len({p.ranks for p in points}) > 1
    columns = {"beta": [traffic(p.ranks) * p.bytes for p in points]}
    if alpha is None and alpha_known:
        columns["alpha"] = [messages(p.ranks) for p in points]
    if with_start:
        columns["start"] = [1.0 for _ in points]
    seconds = np.array([p.seconds for p in points])
    known = np.array([messages(p.ranks) * (alpha or 0.0) for p in points])
    values = _least_squares_of_logarithms(np.array([*columns.values()], float).T, known, seconds)
    found = {"start": 0.0, "alpha": alpha or 0.0, **dict(zip(columns, values.tolist(), strict=True))}
    result = Fit(**found, alpha_known=alpha_known)
    errors = sorted(abs(result.seconds(p.ranks, p.bytes) / p.seconds - 1) for p in points)
    return replace(result, errors=tuple(errors))


def _least_squares_of_logarithms(
    matrix: NDArray[np.float64], known: NDArray[np.float64], seconds: NDArray[np.float64]
) -> NDArray[np.float64]:
    """x [columns], none below 0, with the least squares of log((known + matrix @ x) / seconds).

    It starts from the least squares of relative errors. "dogbox" can end on a limit; "trf" cannot.
    """
    from scipy import optimize  # a second of every start, where no fit is asked for

    relative = matrix / seconds[:, None]
    scale = np.linalg.norm(relative, axis=0)  # columns differ by the size of a byte's time
    relative, known = relative / scale, known / seconds
    start, _ = optimize.nnls(relative, 1 - known)
    if not (known + relative @ start).all():
        return start / scale
    found = optimize.least_squares(
        lambda x: np.log(known + relative @ x),
        start,
        lambda x: relative / (known + relative @ x)[:, None],
        bounds=(0, np.inf),
        method="dogbox",
    )
    return found.x / scale


def fits_by_way(measured: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    """alpha, beta and, for Horovod, the start, from the measurements of each way ("horovod", "mpi")."""
    mpi = fit(measured.get("mpi", ()), with_start=False)
    points = measured.get("horovod", ())
    # On one number of ranks Horovod's start cannot be told from its messages. MPI's alpha is that of the same messages.
    single = len({p.ranks for p in points}) == 1
    horovod = fit(points, with_start=True, alpha=mpi.alpha if mpi and single else None)
    return {way: found for way, found in (("horovod", horovod), ("mpi", mpi)) if found is not None}
