"""`benchmark allreduce`: time, bandwidth and correctness of all-reduces by size, in the terms of nccl-tests.

Each size goes through Horovod as gradients do, and through MPI directly; the two take turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import DistributedOptimizer, collectives
from hvd_cifar.errors import UserError
from hvd_cifar.runtime import devices, direct_mpi
from hvd_cifar.tools.benchmark.job import Job, facts_of
from hvd_cifar.tools.benchmark.results import AllreducePoint, AllreduceResult, Estimate
from hvd_cifar.tools.settings import BenchmarkAllreduceSettings

Way = Literal["horovod", "mpi"]
WIDTH = 4  # bytes of a float32
# Terms are small whole numbers: float32 holds their sum over 80,000 ranks exactly, in any order.
RANK_FACTORS = 16
PATTERN = 13
# Memory of a rank, in messages: terms, TensorFlow's copy, received, sums, expected, and two in transit.
BUFFERS = 7

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
    optimizer = DistributedOptimizer(keras.optimizers.SGD(), op="sum", process_set=process_set)
    # One graph for all sizes: tracing one for each size takes long.
    signature = [tf.TensorSpec([None], tf.float32)]
    return tf.function(lambda terms: optimizer.reduce([terms])[0], input_signature=signature, autograph=False)


def measure(job: Job, settings: BenchmarkAllreduceSettings) -> AllreduceResult:
    """Measure all sizes on all groups of the job; a collective, and every rank returns the same.

    Wrong sums do not end the measurement; the result counts them.

    Raises:
        UserError: on every rank, where a host lacks the memory for the largest message.
    """
    world, free = job.world, devices.available_memory(swap=False)
    collectives.on_every_rank(lambda: check_memory(settings.max_bytes, world.local_size, world.host, free))
    reason = direct_mpi.why_not()
    chosen: tuple[Way, ...] = ("horovod",) if reason else ("horovod", "mpi")
    points = []
    for k, process_set in job.sets.items():
        horovod = through_horovod(process_set) if job.includes_me(k) else None
        mpi = None if reason else direct_mpi.make_sum(k)
        for size in sizes(settings.min_bytes, settings.max_bytes, settings.factor):
            ways = _ways(job, k, size, horovod, mpi)
            points += list(_measure_size(job, k, size, ways, chosen, settings))
    return AllreduceResult(facts=facts_of(job.world), points=points, skipped={"mpi": reason} if reason else {})


def check_memory(largest: int, ranks: int, host: str, available: int) -> None:
    """UserError where the `ranks` ranks of a host cannot hold messages of `largest` bytes in `available` bytes."""
    needed = BUFFERS * largest * ranks
    if needed > available:
        raise UserError(
            f"all-reduces of {largest:,} bytes: {ranks} ranks of {host} need {needed / 2**30:,.1f} GiB for them, and "
            f"{available / 2**30:,.1f} GiB are free; give --max-bytes at most {available // (BUFFERS * ranks)}"
        )


def _ways(job: Job, k: int, size: int, reduce: Reduce | None, mpi: Any) -> dict[Way, Callable[[], Any]]:
    """By way, a function that makes one all-reduce and returns the sums; empty on ranks that wait."""
    if reduce is None:
        return {}
    terms = terms_of(job.world.rank, size // WIDTH)
    received = np.empty_like(terms)
    with tf.device(job.world.device):
        tensor = tf.constant(terms)

    def by_mpi() -> Any:
        mpi(terms, received)
        return received

    return {"horovod": lambda: reduce(tensor), "mpi": by_mpi}


def _measure_size(
    job: Job, k: int, size: int, ways: dict[Way, Any], chosen: Sequence[Way], settings: BenchmarkAllreduceSettings
) -> Iterator[AllreducePoint]:
    budget = settings.seconds / settings.repeats
    iterations: dict[Way, int] = {}
    for way in chosen:
        once = max(wall for wall, _ in _time(job, k, ways.get(way), 2)[0])
        iterations[way] = int(min(settings.iterations, max(1.0, budget / max(once, 1e-9))))
    seconds: dict[Way, list[float]] = {way: [] for way in chosen}
    processor: dict[Way, list[float]] = {way: [] for way in chosen}
    wrong: dict[Way, int] = dict.fromkeys(chosen, 0)
    for repeat in range(settings.repeats):
        for way in chosen if repeat % 2 else chosen[::-1]:
            by_rank, sums = _time(job, k, ways.get(way), iterations[way])
            for taken, values in zip((seconds, processor), zip(*by_rank, strict=True), strict=True):
                taken[way].append(max(values))
            if repeat == settings.repeats - 1:
                of_this_rank = 0 if sums is None else int((sums != sums_of(k, len(sums))).sum())
                wrong[way] = sum(collectives.all_gather_object(of_this_rank))
    for way in chosen:
        estimate = Estimate.of(seconds[way])
        bandwidth = size / estimate.mean
        yield AllreducePoint(
            way=way,
            ranks=k,
            bytes=size,
            iterations=iterations[way] * settings.repeats,
            seconds=estimate,
            algorithm_bandwidth=bandwidth,
            bus_bandwidth=bandwidth * 2 * (k - 1) / k,
            processor_seconds=statistics.fmean(processor[way]),
            wrong_values=wrong[way],
        )


def _time(job: Job, k: int, once: Callable[[], Any] | None, iterations: int) -> tuple[list[tuple[float, float]], Any]:
    """Wall and processor seconds of one iteration, by rank; and this rank's last sums. A collective."""
    seconds = processor = 0.0
    result: Any = None
    if once is not None:
        collectives.barrier(job.sets[k])
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(iterations):
            result = once()
        np.asarray(result[-1:])  # waits for the device, and copies four bytes
        seconds = (time.perf_counter() - began) / iterations
        processor = (time.process_time() - worked) / iterations
    taken = collectives.all_gather_object((seconds, processor))[:k]
    return taken, None if result is None else np.asarray(result)
