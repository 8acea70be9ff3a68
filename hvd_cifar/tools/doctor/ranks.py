"""The small job in its ranks: all-reduces over all ranks and over pairs of ranks, whose sums are checked and timed.

Ranks print to stderr which pair they begin and end, so that a pair that hangs is known. At the end rank 0 prints a line
of JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from hvd_cifar.distributed import collectives, pairs
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import direct_mpi
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.runtime.world import session
from hvd_cifar.tools.benchmark.allreduce import sums_of, terms_of
from hvd_cifar.tools.doctor.job import BEGINS, ENDS, RESULT
from hvd_cifar.tools.settings import DoctorJobSettings

Pair = tuple[int, int]

MOST_ROUNDS = 64  # between hosts, each of about a second: they cover all pairs of up to 64 hosts
WIDTH = 4  # bytes of a float32
TRIES, FEW_TRIES = 10, 3  # the shortest counts: other work on a host only makes a try longer
FIRST_BYTES, MOST_BYTES, FACTOR = 2**16, 2**24, 4
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores
SECONDS_OF_TRIES = 0.4  # for one size, approximately
COUNT_OVER_ALL = 2**18  # values of the all-reduce over all ranks: about the gradients of a small net


def run(settings: DoctorJobSettings) -> None:
    """Run this rank's part of the job.

    Raises UserError where the number of ranks is not that of `--per-host`.
    """
    per_host = [int(word) for word in settings.per_host.split(",")]
    if launched_size() != sum(per_host):
        raise UserError(f"--per-host {settings.per_host}: the launcher started {launched_size()} ranks")
    with session() as world:
        everyone = pairs.by_horovod(world.device)
        wrong = int(np.sum(everyone(terms_of(world.rank, COUNT_OVER_ALL)) != sums_of(world.size, COUNT_OVER_ALL)))
        links: list[tuple[Pair, float, float, int]] = []
        for met in rounds(per_host) if direct_mpi.why_not() is None else []:
            reduce = pairs.by_mpi(met)
            if reduce is None:
                continue
            mine = next(pair for pair in met if world.rank in pair)
            terminal.complain(f"{BEGINS} {mine[0]} {mine[1]}")
            found = measure(reduce, world.rank, mine)
            terminal.complain(f"{ENDS} {mine[0]} {mine[1]}")
            if world.rank == mine[0]:
                links.append((mine, *found))
        gathered = collectives.all_gather_object((world.host, wrong, links))
        if world.is_root:
            result = {
                "how": world.describe(),
                "hosts": [host for host, *_ in gathered],
                "wrong_values": sum(count for _, count, _ in gathered),
                "links": [link for *_, of_rank in gathered for link in of_rank],
            }
            terminal.say(RESULT + json.dumps(result))


def rounds(per_host: Sequence[int]) -> list[list[Pair]]:
    """The pairs of ranks to measure, in rounds: in a round each rank is in at most one pair.

    First two ranks of each host. Then every two hosts, by their first ranks and the circle method: one stays in its
    seat, the others move on by one.

    Args:
        per_host: number of ranks of each host.
    """
    first = list(accumulate(per_host, initial=0))[:-1]
    found = [[(rank, rank + 1) for rank, count in zip(first, per_host, strict=True) if count > 1]]
    seats: list[int | None] = [*first, *([None] if len(first) % 2 else [])]
    for _ in range(min(len(seats) - 1, MOST_ROUNDS)):
        met = [(seats[i], seats[-1 - i]) for i in range(len(seats) // 2)]
        found.append([(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return [met for met in found if met]


def measure(reduce: Callable[[Any], Any], rank: int, pair: Pair) -> tuple[float, float, int]:
    """Seconds of a pair's smallest all-reduce, bytes per second of a large one, and the number of wrong values.

    An all-reduce averages each time over both ranks, so that both take the same branches.
    """
    wrong = 0

    def seconds(count: int, tries: int) -> float:
        nonlocal wrong
        terms = terms_of(rank, count)
        expected = terms_of(pair[0], count) + terms_of(pair[1], count)
        best = float("inf")
        for _ in range(tries):
            begin = time.perf_counter()
            sums = reduce(terms)
            best = min(best, time.perf_counter() - begin)
            wrong += int(np.sum(sums != expected))
        return float(reduce(np.array([best], np.float32))[0]) / 2

    seconds(1, 1)  # the first message makes the connection
    smallest = seconds(1, TRIES)
    size, took = FIRST_BYTES, seconds(FIRST_BYTES // WIDTH, FEW_TRIES)
    while took < ENOUGH_SECONDS and size < MOST_BYTES:
        size *= FACTOR
        took = seconds(size // WIDTH, max(1, min(FEW_TRIES, int(SECONDS_OF_TRIES / (took * FACTOR)))))
    both = float(reduce(np.array([wrong], np.float32))[0])
    return smallest, size / max(took - smallest, 1e-9), int(both)
