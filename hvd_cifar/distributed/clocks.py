"""The clocks of all ranks on one time base: that of rank 0."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from . import collectives

ROUNDS = 100  # barriers of a comparison, each below a millisecond: enough for some in which no rank is interrupted


class Comparison(NamedTuple):
    """A rank's clock beside that of rank 0, in nanoseconds.

    time: of this rank's clock, when they were compared. ahead: of rank 0's clock. uncertainty: the true value of
    `ahead` differs by at most this.
    """

    time: int
    ahead: int
    uncertainty: int


def compare() -> Comparison:
    """Compare the clocks; a collective.

    No rank leaves a barrier before every rank has entered it. So each barrier gives limits for the difference of two
    clocks, whatever the delays of its messages are, and the narrowest limits of all barriers hold.
    """
    readings = []
    for _ in range(ROUNDS):
        entered = time.time_ns()
        collectives.barrier()
        readings.append((entered, time.time_ns()))
    root = collectives.broadcast_object(readings)
    ahead, uncertainty = between(readings, root)
    return Comparison((readings[0][0] + readings[-1][1]) // 2, ahead, uncertainty)


def between(own: Sequence[tuple[int, int]], root: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """How far a clock is ahead of rank 0's, and the uncertainty of it.

    Args:
        own, root: when the rank, and rank 0, entered and left each barrier, by their own clocks.
    """
    if own == root:
        return 0, 0
    least = max(mine[0] - other[1] for mine, other in zip(own, root, strict=True))
    most = min(mine[1] - other[0] for mine, other in zip(own, root, strict=True))
    # If a clock drifts during the barriers, `least` may exceed `most`.
    return (least + most) // 2, abs(most - least) // 2 + 1


def on_root(when: int, first: Comparison, last: Comparison) -> int:
    """The time of rank 0's clock at a time of this rank's, between two comparisons or near them; nanoseconds."""
    drift = (last.ahead - first.ahead) / max(last.time - first.time, 1)
    return when - first.ahead - round(drift * (when - first.time))
