"""The small job in its ranks: all-reduces whose sums are checked. Rank 0 prints a line of JSON."""

from __future__ import annotations

import json

from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import session
from hvd_cifar.tools.benchmark import allreduce
from hvd_cifar.tools.doctor.job import RESULT
from hvd_cifar.tools.settings import DoctorJobSettings

TRIES = 3  # of each size
FIRST_BYTES, MOST_BYTES, FACTOR = 2**16, 2**24, 4
ENOUGH_SECONDS = 0.2  # a message of this duration shows the bandwidth, also on busy cores


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
        if world.is_root:
            terminal.say(RESULT + json.dumps([world.describe(), wrong, found.bus_bandwidth]))
