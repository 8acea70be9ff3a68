"""The pairs of ranks to measure, in rounds: in a round each rank is in at most one pair."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest

Pair = tuple[int, int]

ALL_PAIRS_OVER_MPI = 64  # hosts; each round takes about a second
# Each pair is a process set of Horovod; in each cycle every rank serves all its sets.
ALL_PAIRS_OVER_HOROVOD = 8


def leaders(per_host: Sequence[int]) -> list[int]:
    """The first rank of each host; `per_host`: numbers of ranks."""
    return list(accumulate(per_host, initial=0))[:-1]


def rounds(per_host: Sequence[int], by_mpi: bool, on_gpus: bool = False) -> list[list[Pair]]:
    """Pairs within hosts come first: two ranks of each host, on GPUs every two. Then pairs of hosts: their first ranks.

    All pairs of hosts are in the plan up to a number of hosts. Beyond it each host is paired only with those 1, 2, 4,
    ... places further.
    """
    first = leaders(per_host)
    of_hosts = [_all_against_all(count if on_gpus else min(count, 2)) for count in per_host]
    within = [
        [(begin + a, begin + b) for begin, pairs in zip(first, at_once, strict=True) for a, b in pairs]
        for at_once in zip_longest(*of_hosts, fillvalue=[])
    ]
    most = ALL_PAIRS_OVER_MPI if by_mpi else ALL_PAIRS_OVER_HOROVOD
    between = _all_against_all(len(first)) if len(first) <= most else _some_against_some(len(first))
    found = [*within, *([(first[a], first[b]) for a, b in pairs] for pairs in between)]
    return [pairs for pairs in found if pairs]


def _all_against_all(count: int) -> list[list[Pair]]:
    """Every two of `count`, by the circle method: one stays in its seat, the others move on by one."""
    seats: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def _some_against_some(count: int) -> list[list[Pair]]:
    """Each with those at distances 1, 2, 4, ... on a circle; a distance takes up to three rounds."""
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
