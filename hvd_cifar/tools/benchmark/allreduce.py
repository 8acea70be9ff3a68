"""`benchmark allreduce`: time, bandwidth and correctness of all-reduces by size, in the terms of nccl-tests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.reduction import Reduction
from hvd_cifar.errors import UserError
from hvd_cifar.runtime import devices
from hvd_cifar.tools.benchmark.job import Job, facts_of
from hvd_cifar.tools.benchmark.results import AllreducePoint, AllreduceResult, Estimate
from hvd_cifar.tools.settings import BenchmarkAllreduceSettings

WIDTH = 4  # bytes of a float32
# Terms are small whole numbers: float32 holds their sum over 80,000 ranks exactly, in any order.
RANK_FACTORS = 16
PATTERN = 13
# Memory of a rank, in messages: terms, TensorFlow's copy, sums, expected, and two in transit.
BUFFERS = 6

Reduce = Callable[[Any], Any]  # this rank's terms -> the sums over the ranks


def sizes(least: int, most: int, factor: int) -> list[int]:
    """Bytes of the messages: from `least` in steps of `factor`, whole float32 values, and `most` at the end."""
    found = {least // WIDTH * WIDTH, most // WIDTH * WIDTH}
    size = least
    while size < most:
        found.add(size // WIDTH * WIDTH)
        size *= factor
    return sorted(found)


def terms_of(rank: int, count: int) -> NDArray[np.float32]:
    """A rank's terms, float32 [count]. Neighbouring values differ, and 16 neighbouring ranks have different terms."""
    return _pattern(count) * np.float32(rank % RANK_FACTORS + 1)


def sums_of(ranks: int, count: int) -> NDArray[np.float32]:
    """The exact sums over the ranks, float32 [count]."""
    factors = sum(rank % RANK_FACTORS + 1 for rank in range(ranks))
    return _pattern(count) * np.float32(factors)


def _pattern(count: int) -> NDArray[np.float32]:
    # In int32, since float32 does not hold every integer above 2^24, the number of values in 64 MiB.
    return (np.arange(count, dtype=np.int32) % PATTERN + 1).astype(np.float32)


def through_horovod(process_set: Any) -> Reduce:
    """The all-reduce that the optimizer uses for gradients."""
    reduction = Reduction(average=False, process_set=process_set)
    # One graph for all sizes: tracing one for each size takes long.
    signature = [tf.TensorSpec([None], tf.float32)]
    return tf.function(lambda terms: reduction.reduce([terms])[0], input_signature=signature, autograph=False)


def measure(job: Job, settings: BenchmarkAllreduceSettings) -> AllreduceResult:
    """Measure all sizes on all groups of the job; a collective, and every rank returns the same.

    Wrong sums do not end the measurement; the result counts them.

    Raises:
        UserError: on every rank, where a host lacks the memory for the largest message.
    """
    world, free = job.world, devices.available_memory(swap=False)
    collectives.on_every_rank(lambda: check_memory(settings.max_bytes, world.local_size, world.host, free))
    points = []
    for k, process_set in job.sets.items():
        reduce = through_horovod(process_set) if job.includes_me(k) else None
        for size in sizes(settings.min_bytes, settings.max_bytes, settings.factor):
            points.append(_measure_size(job, k, size, reduce, settings))
    return AllreduceResult(facts=facts_of(job.world), points=points)


def check_memory(largest: int, ranks: int, host: str, available: int) -> None:
    """UserError where the `ranks` ranks of a host cannot hold messages of `largest` bytes in `available` bytes."""
    needed = BUFFERS * largest * ranks
    if needed > available:
        raise UserError(
            f"all-reduces of {largest:,} bytes: {ranks} ranks of {host} need {needed / 2**30:,.1f} GiB for them, and "
            f"{available / 2**30:,.1f} GiB are free; give --max-bytes at most {available // (BUFFERS * ranks)}"
        )


def _measure_size(
    job: Job, k: int, size: int, reduce: Reduce | None, settings: BenchmarkAllreduceSettings
) -> AllreducePoint:
    """Measure a size on the first k ranks; `reduce` is None on ranks that wait. A collective."""
    with tf.device(job.world.device):
        terms = tf.constant(terms_of(job.world.rank, size // WIDTH)) if reduce else None
    sums: Any = None

    def time_of(iterations: int) -> tuple[float, float]:
        """Wall and processor seconds of one all-reduce: the mean over `iterations`, on the slowest rank."""
        nonlocal sums
        seconds = processor = 0.0
        if reduce:
            collectives.barrier(job.sets[k])
            began, worked = time.perf_counter(), time.process_time()
            for _ in range(iterations):
                sums = reduce(terms)
            np.asarray(sums[-1:])  # waits for the device, and copies four bytes
            seconds = (time.perf_counter() - began) / iterations
            processor = (time.process_time() - worked) / iterations
        by_rank = collectives.all_gather_object((seconds, processor))
        return max(wall for wall, _ in by_rank), max(work for _, work in by_rank)

    once, budget = time_of(2)[0], settings.seconds / settings.repeats
    iterations = int(min(settings.iterations, max(1.0, budget / max(once, 1e-9))))
    taken = [time_of(iterations) for _ in range(settings.repeats)]
    wrong = int((np.asarray(sums) != sums_of(k, size // WIDTH)).sum()) if reduce else 0
    estimate = Estimate.of([wall for wall, _ in taken])
    bandwidth = size / estimate.mean
    return AllreducePoint(
        ranks=k,
        bytes=size,
        iterations=iterations * settings.repeats,
        seconds=estimate,
        algorithm_bandwidth=bandwidth,
        bus_bandwidth=bandwidth * 2 * (k - 1) / k,
        processor_seconds=statistics.fmean(work for _, work in taken),
        wrong_values=sum(collectives.all_gather_object(wrong)),
    )
