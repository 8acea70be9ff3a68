"""A formula for the time of an all-reduce, fitted to measurements. Pure functions.

An all-reduce of S bytes over H hosts of L ranks each has two levels (docs/network.md): a ring between the hosts, and
one between the ranks of each host. A ring of n takes 2 (n - 1) messages, one after the other, of S / n bytes each:

    seconds = start + 2 (H - 1) alpha + 2 (H - 1) / H * S * beta + 2 (L - 1) alpha' + 2 (L - 1) / L * S * beta'

alpha is the time of an empty message and beta the time of a byte between hosts, alpha' and beta' are those within a
host (Patarasuk, Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009). `start` does not
depend on the ranks: Horovod looks for work at intervals (HOROVOD_CYCLE_TIME), and its ranks agree on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

# Bytes of the shortest message in a fit, where there are longer ones. For shorter ones the all-reduce uses another
# algorithm than a ring, and a step sends none.
LEAST_BYTES = 2**14
INDEPENDENT = 1e-6  # the least relative singular value of linearly independent columns


@dataclass(frozen=True)
class Layout:
    """Where ranks are: `local` on each of `hosts`."""

    hosts: int
    local: int

    @property
    def ranks(self) -> int:
        """Their number."""
        return self.hosts * self.local

    @classmethod
    def of(cls, local_ranks: Sequence[int]) -> Layout:
        """Of a job, from each rank's local rank. Unevenly spread ranks form one ring, as if each had its own host."""
        hosts = local_ranks.count(0)
        even = all(local_ranks.count(i) == hosts for i in range(max(local_ranks) + 1))
        return cls(hosts, len(local_ranks) // hosts) if even else cls(len(local_ranks), 1)

    @classmethod
    def filled(cls, ranks: int, slots: int) -> Layout:
        """`ranks` on hosts that are filled in turn with up to `slots` each. Unevenly spread ranks form one ring."""
        local = min(ranks, slots)
        return cls(ranks, 1) if ranks % local else cls(ranks // local, local)


@dataclass(frozen=True)
class Point:
    """One measurement of an all-reduce: layout, bytes of the message, seconds."""

    layout: Layout
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """The numbers of the formula, and its errors.

    start, alpha, local_alpha: in seconds. beta, local_beta: in seconds a byte.
    unknown: the numbers that the measurements do not determine. They are 0, and `start` includes their part.
    errors: |predicted / measured - 1| of the measurements, ascending.
    """

    start: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    local_alpha: float = 0.0
    local_beta: float = 0.0
    unknown: tuple[str, ...] = ()
    errors: tuple[float, ...] = ()

    @property
    def median_error(self) -> float:
        """Of |predicted / measured - 1|; 0 without measurements."""
        return float(np.median(self.errors)) if self.errors else 0.0

    @property
    def largest_error(self) -> float:
        """Of |predicted / measured - 1|; 0 without measurements."""
        return max(self.errors, default=0.0)

    def overhead(self, layout: Layout) -> float:
        """The time of an empty all-reduce; 0 for one rank."""
        if layout.ranks == 1:
            return 0.0
        return self.start + messages(layout.hosts) * self.alpha + messages(layout.local) * self.local_alpha

    def per_byte(self, layout: Layout) -> float:
        """The time of each byte."""
        return traffic(layout.hosts) * self.beta + traffic(layout.local) * self.local_beta

    def seconds(self, layout: Layout, size: float) -> float:
        """The time of an all-reduce of `size` bytes; 0 for one rank."""
        return self.overhead(layout) + size * self.per_byte(layout)


def messages(members: int) -> int:
    """Messages that a ring all-reduce sends one after the other: 2 (n - 1)."""
    return 2 * (members - 1)


def traffic(members: int) -> float:
    """Bytes that each member sends for each byte to be reduced: 2 (n - 1) / n. Bus bandwidth is this times S / t."""
    return 2 * (members - 1) / members


def fit(points: Sequence[Point], with_start: bool) -> Fit | None:
    """Least squares of log(predicted / measured), with no number below 0.

    Times range from microseconds to seconds; ratios give all sizes the same weight. With logarithms a prediction twice
    as long is as wrong as one half as long. With predicted / measured - 1 a prediction of nearly 0 would cost at most
    1, and noise would make every network look faster.

    Args:
        with_start: whether to fit a `start`. Measurements on one layout cannot tell it from alpha.

    Returns:
        None without measurements of two sizes on two ranks or more.
    """
    points = [p for p in points if p.layout.ranks > 1 and p.seconds > 0]
    long = [p for p in points if p.bytes >= LEAST_BYTES]
    points = long if len({p.bytes for p in long}) > 1 else points
    if len({p.bytes for p in points}) < 2:
        return None
    seconds = np.array([p.seconds for p in points])
    relative: dict[str, NDArray[np.float64]] = {}
    wanted = [name for name in _FACTORS if with_start or name != "start"]
    for name in wanted:
        column = np.array([_FACTORS[name](p) for p in points], float) / seconds
        if _rank([*relative.values(), column]) > len(relative):
            relative[name] = column
    values = _least_squares_of_logarithms(np.array([*relative.values()]).T)
    unknown = tuple(name for name in wanted if name not in relative)
    found = Fit(**dict(zip(relative, values.tolist(), strict=True)), unknown=unknown)
    return replace(found, errors=tuple(sorted(abs(found.seconds(p.layout, p.bytes) / p.seconds - 1) for p in points)))


# The factor of each number in the formula. Where the measurements cannot tell two apart, the first one is fitted.
_FACTORS: dict[str, Callable[[Point], float]] = {
    "beta": lambda p: traffic(p.layout.hosts) * p.bytes,
    "start": lambda p: 1.0,
    "alpha": lambda p: messages(p.layout.hosts),
    "local_beta": lambda p: traffic(p.layout.local) * p.bytes,
    "local_alpha": lambda p: messages(p.layout.local),
}


def _rank(columns: Sequence[NDArray[np.float64]]) -> int:
    matrix = np.array([column / max(float(np.linalg.norm(column)), 1e-300) for column in columns])
    return int(np.linalg.matrix_rank(matrix, tol=INDEPENDENT))


def _least_squares_of_logarithms(relative: NDArray[np.float64]) -> NDArray[np.float64]:
    """x [columns], none below 0, with the least squares of log(relative @ x).

    It starts from the least squares of relative errors. "dogbox" can find a solution on a bound, unlike "trf".
    """
    from scipy import optimize  # here, since the import takes a second

    scale = np.linalg.norm(relative, axis=0)  # seconds a byte are some 1e9 times smaller than seconds a message
    relative = relative / scale
    start, _ = optimize.nnls(relative, np.ones(len(relative)))
    if not (relative @ start).all():
        return start / scale
    found = optimize.least_squares(
        lambda x: np.log(relative @ x),
        start,
        lambda x: relative / (relative @ x)[:, None],
        bounds=(0, np.inf),
        method="dogbox",
    )
    return found.x / scale


def fits_by_way(measured: Mapping[str, Sequence[Point]]) -> dict[str, Fit]:
    """The fit of each way ("horovod", "mpi", "processor"); MPI alone has no `start`."""
    found = {way: fit(points, with_start=way != "mpi") for way, points in measured.items() if way != "copy"}
    return {way: of_way for way, of_way in found.items() if of_way is not None}
