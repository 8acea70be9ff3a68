"""The small job in its ranks: all-reduces whose sums are checked, then messages between neighbouring hosts.

Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import math
import time

import numpy as np

from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import World, mpi, session
from hvd_cifar.tools.benchmark import allreduce
from hvd_cifar.tools.doctor.job import RESULT
from hvd_cifar.tools.settings import DoctorJobSettings

TRIES = 3  # of each size, and of each link
FIRST_BYTES, MOST_BYTES, FACTOR = 2**16, 2**24, 4
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores
# Of all links together, as far as messages do not get so small that their latency hides the bandwidth.
RING_SECONDS, LEAST_LINK_BYTES = 20.0, 2**20
LEAST_RING = 3  # hosts: two have one link, which nothing is compared with


def run(_: DoctorJobSettings) -> None:
    """Run this rank's part of the job."""
    with session() as world:
        reduce, size, wrong = allreduce.through_horovod(), FIRST_BYTES, 0
        while True:
            found = allreduce.measure_size(world, reduce, size, TRIES)
            wrong += found.wrong_values
            if size >= MOST_BYTES or found.seconds.mean >= ENOUGH_SECONDS:
                break
            size *= FACTOR
        rates = links(world, found.bus_bandwidth)
        if world.is_root:
            terminal.say(RESULT + json.dumps([world.describe(), wrong, found.bus_bandwidth, rates]))


def links(world: World, rate: float) -> list[float]:
    """Bytes per second between each host and the next one, the last host and the first; [] below three hosts.

    The hosts' first ranks measure by MPI, one link after another. The shortest try counts: other work on a host only
    makes a try longer. A collective.

    Args:
        rate: bytes per second in all-reduces over all ranks.
    """
    ranks, firsts = mpi().COMM_WORLD, [rank for rank, facts in enumerate(world.ranks) if facts.local_rank == 0]
    if len(firsts) < LEAST_RING:
        return []
    affordable = RING_SECONDS * rate / (len(firsts) * TRIES)
    message = np.zeros(int(min(MOST_BYTES, max(LEAST_LINK_BYTES, affordable))), np.uint8)
    rates = []
    for a, b in zip(firsts, [*firsts[1:], firsts[0]], strict=True):
        took = math.inf if world.rank in (a, b) else 0.0
        for _ in range(TRIES):
            ranks.Barrier()
            begin = time.perf_counter()
            if world.rank == a:
                ranks.Send(message, b)
                ranks.Recv(message, b)
            elif world.rank == b:
                ranks.Recv(message, a)
                ranks.Send(message, a)
            took = min(took, time.perf_counter() - begin)
        rates.append(2 * len(message) / max(ranks.allgather(took)))
    return rates
