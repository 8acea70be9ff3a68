"""The small job in its ranks: all-reduces over all ranks and between hosts, whose sums are checked and timed.

Where all ranks compute on GPUs, the job also measures each pair of ranks on a host, and compares a training step of
each preset with the CPU's.

Ranks print to stderr which pair they begin and end, so that a pair that hangs is known. At the end rank 0 prints a line
of JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hvd_cifar.config import DoctorJobSettings
from hvd_cifar.distributed import collectives, pairs, process_sets
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import direct_mpi
from hvd_cifar.runtime.environment import launched_size, under_mpi
from hvd_cifar.runtime.world import session
from hvd_cifar.tools.benchmark.allreduce import sums_of, terms_of
from hvd_cifar.tools.doctor import first_steps
from hvd_cifar.tools.doctor.job import BEGINS, ENDS, RESULT
from hvd_cifar.tools.doctor.plan import Pair, rounds

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
    through_mpi = under_mpi() and not settings.on_gpus  # MPI moves host memory, NCCL that of GPUs
    planned = rounds(per_host, under_mpi(), settings.on_gpus)
    sets = {} if through_mpi else pairs.sets_for(planned, sum(per_host))
    with session(process_sets=process_sets.to_register(sets)) as world:
        everyone = pairs.by_horovod(world.device)
        terms = terms_of(world.rank, COUNT_OVER_ALL)
        wrong = int(np.sum(everyone(terms) != sums_of(world.size, COUNT_OVER_ALL)))
        mpi = through_mpi and direct_mpi.why_not() is None
        links: list[list[float]] = []
        for planned_round in planned if mpi or not through_mpi else []:
            mine = next((pair for pair in planned_round if world.rank in pair), None)
            reduce = pairs.by_mpi(planned_round) if mpi else None
            if mine is None:
                continue
            reduce = reduce or pairs.by_horovod(world.device, sets[mine])
            terminal.complain(f"{BEGINS} {mine[0]} {mine[1]}")
            found = measure(reduce, world.rank, mine)
            terminal.complain(f"{ENDS} {mine[0]} {mine[1]}")
            if world.rank == mine[0]:
                links.append([*mine, *found])
        steps = first_steps.compare(world, first_steps.PRECISIONS) if settings.on_gpus else []
        gpu = collectives.on_every_rank(first_steps.look_at_gpu) if settings.on_gpus else None
        gathered = collectives.all_gather_object((world.host, wrong, links, gpu))
        if world.is_root:
            result = {
                "how": world.describe(),
                "hosts": [host for host, *_ in gathered],
                "wrong_values": sum(count for _, count, *_ in gathered),
                "links": [link for _, _, of_rank, _ in gathered for link in of_rank],
                "first_steps": [step.model_dump() for step in steps],
                "gpus": [gpu.model_dump() for *_, gpu in gathered if gpu],
                "through": "MPI" if mpi else "Horovod",
            }
            terminal.say(RESULT + json.dumps(result))


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
    if tries := min(FEW_TRIES, int(SECONDS_OF_TRIES / took)):
        took = min(took, seconds(size // WIDTH, tries))
    both = float(reduce(np.array([wrong], np.float32))[0])
    return smallest, size / max(took - smallest, 1e-9), int(both)
