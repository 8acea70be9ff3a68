"""The small job in its ranks: all-reduces over all ranks, checked and timed. Rank 0 prints a line of JSON."""

from __future__ import annotations

import json
import time

import numpy as np
import tensorflow as tf

from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import session
from hvd_cifar.tools.benchmark.allreduce import WIDTH, sums_of, terms_of, through_horovod
from hvd_cifar.tools.doctor.job import RESULT
from hvd_cifar.tools.settings import DoctorJobSettings

TRIES = 3  # of each size; the shortest counts: other work on a host only makes a try longer
FIRST_BYTES, MOST_BYTES, FACTOR = 2**16, 2**24, 4
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores


def run(_: DoctorJobSettings) -> None:
    """Run this rank's part of the job."""
    with session() as world:
        reduce = through_horovod(process_sets.first_ranks([world.size], world.size)[world.size])
        size, took, wrong = FIRST_BYTES // FACTOR, 0.0, 0
        while size < MOST_BYTES and took < ENOUGH_SECONDS:
            size *= FACTOR
            with tf.device(world.device):
                terms = tf.constant(terms_of(world.rank, size // WIDTH))
            took = float("inf")
            for _try in range(TRIES):
                begin = time.perf_counter()
                sums = np.asarray(reduce(terms))
                took = min(took, time.perf_counter() - begin)
                wrong += int(np.sum(sums != sums_of(world.size, size // WIDTH)))
            took = max(collectives.all_gather_object(took))  # all ranks take the same branch
        wrong = sum(collectives.all_gather_object(wrong))
        if world.is_root:
            rate = 2 * (world.size - 1) / world.size * size / took
            terminal.say(RESULT + json.dumps([world.describe(), wrong, rate]))
