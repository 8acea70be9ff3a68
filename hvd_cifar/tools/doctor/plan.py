"""Who is measured with whom: pairs of ranks, in rounds in which no rank is twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

Pair = tuple[int, int]

ALL_PAIRS_OVER_MPI = 64  # hosts; each round takes about a second
# Each pair is a process set of Horovod's, and every rank looks after all its sets every cycle.
ALL_PAIRS_OVER_HOROVOD = 8


def leaders(per_host: Sequence[int]) -> list[int]:
    """The first rank of each host, from the number of ranks on each."""
    return list(accumulate(per_host, initial=0))[:-1]


def rounds(per_host: Sequence[int], by_mpi: bool) -> list[list[Pair]]:
    """Two ranks of each host that has them, then every two hosts by their first ranks.

    Of very many hosts each meets only those 1, 2, 4, ... places further: then each has many links all the same.
    """
    first = leaders(per_host)
    within = [(rank, rank + 1) for rank, count in zip(first, per_host, strict=True) if count > 1]
    most = ALL_PAIRS_OVER_MPI if by_mpi else ALL_PAIRS_OVER_HOROVOD
    between = _all_against_all(len(first)) if len(first) <= most else _some_against_some(len(first))
    found = [within, *([(first[a], first[b]) for a, b in pairs] for pairs in between)]
    return [pairs for pairs in found if pairs]


def _all_against_all(count: int) -> list[list[Pair]]:
    """Every two of `count`, by the circle method: one stays, the others turn around it."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _some_against_some(count: int) -> list[list[Pair]]:
    """Each with those at distances 1, 2, 4, ... around the circle; each distance in up to three rounds."""
    found: list[list[Pair]] = []
    for distance in (2**i for i in range(int(math.log2(count // 2)) + 1)):
        left = {(min(a, b), max(a, b)) for a in range(count) for b in [(a + distance) % count]}
        while left:
            chosen: list[Pair] = []
            busy: set[int] = set()
            for pair in sorted(left):
                if not busy & set(pair):
                    chosen.append(pair)
                    busy |= set(pair)
            left -= set(chosen)
            found.append(chosen)
    return found
