"""The small job in its ranks: all-reduces over all ranks, then between every two neighbours in the ring of hosts.

Sums are checked. Rank 0 prints a line of JSON.
"""

from __future__ import annotations

import json
import time

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.distributed.reduction import Reduction
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import World, session
from hvd_cifar.tools.benchmark.allreduce import WIDTH, sums_of, terms_of
from hvd_cifar.tools.doctor.job import RESULT
from hvd_cifar.tools.settings import DoctorJobSettings

TRIES = 3  # of each size; the shortest counts: other work on a host only makes a try longer
FIRST_BYTES, MOST_BYTES, FACTOR = 2**16, 2**24, 4
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores
# Of all links together, as far as messages do not get so small that their latency hides the bandwidth.
RING_SECONDS, LEAST_LINK_BYTES = 20.0, 2**20
LEAST_RING = 3  # hosts: two have one link, which nothing is compared with


def run(_: DoctorJobSettings) -> None:
    """Run this rank's part of the job."""
    with session(process_sets="dynamic") as world:
        of_all = Reduction(average=False)
        size, took, wrong = FIRST_BYTES // FACTOR, 0.0, 0
        while size < MOST_BYTES and took < ENOUGH_SECONDS:
            size *= FACTOR
            took, bad = measure(of_all, world, sums_of(world.size, size // WIDTH))
            wrong += bad
            took = max(collectives.all_gather_object(took))  # all ranks take the same branch
        rate = 2 * (world.size - 1) / world.size * size / took
        rates, bad = links(world, rate)
        wrong = sum(collectives.all_gather_object(wrong + bad))
        if world.is_root:
            terminal.say(RESULT + json.dumps([world.describe(), wrong, rate, rates]))


def measure(reduction: Reduction, world: World, expected: NDArray[np.float32]) -> tuple[float, int]:
    """Seconds of the shortest of some all-reduces with the sums `expected`, and the number of wrong values in all."""
    with tf.device(world.device):
        terms = tf.constant(terms_of(world.rank, len(expected)))
    took, wrong = float("inf"), 0
    for _ in range(TRIES):
        begin = time.perf_counter()
        sums = np.asarray(reduction.reduce([terms])[0])
        took = min(took, time.perf_counter() - begin)
        wrong += int(np.sum(sums != expected))
    return took, wrong


def links(world: World, rate: float) -> tuple[list[float], int]:
    """Bytes per second between each host and the next one, the last host and the first; [] below three hosts.

    The hosts' first ranks measure, one link after another: a pair that waits for a slow one would seem slow itself,
    since Horovod's thread on a host does one thing at a time. A collective.

    Args:
        rate: bytes per second in all-reduces over all ranks.

    Returns:
        The rates, and the number of wrong values that this rank received.
    """
    firsts = [rank for rank, facts in enumerate(world.ranks) if facts.local_rank == 0]
    if len(firsts) < LEAST_RING:
        return [], 0
    affordable = RING_SECONDS * rate / (len(firsts) * TRIES)
    count = int(min(MOST_BYTES, max(LEAST_LINK_BYTES, affordable))) // WIDTH
    rates, wrong = [], 0
    for a, b in zip(firsts, firsts[1:] + firsts[:1], strict=True):
        took, bad = 0.0, 0
        with process_sets.joined([a, b]) as pair:
            if pair.included():
                sums = terms_of(a, count) + terms_of(b, count)
                took, bad = measure(Reduction(average=False, process_set=pair), world, sums)
            rates.append(count * WIDTH / max(collectives.all_gather_object(took)))
        wrong += bad
    return rates, wrong
