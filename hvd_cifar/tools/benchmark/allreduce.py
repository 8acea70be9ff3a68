"""`benchmark allreduce`: time, bandwidth and correctness of all-reduces by size, in the terms of nccl-tests."""

from __future__ import annotations

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
from hvd_cifar.runtime.world import World
from hvd_cifar.tools.benchmark.results import AllreducePoint, AllreduceResult, Estimate, Facts
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


def through_horovod() -> Reduce:
    """The all-reduce that the optimizer uses for gradients."""
    reduction = Reduction(average=False)
    # One graph for all sizes: tracing one for each size takes long.
    signature = [tf.TensorSpec([None], tf.float32)]
    return tf.function(lambda terms: reduction.reduce([terms])[0], input_signature=signature, autograph=False)


def measure(world: World, settings: BenchmarkAllreduceSettings) -> AllreduceResult:
    """Measure all sizes; a collective, and every rank returns the same points.

    Wrong sums do not end the measurement; the result counts them.

    Raises:
        UserError: on every rank, where a host lacks the memory for the largest message.
    """
    free = devices.available_memory(swap=False)
    collectives.on_every_rank(lambda: check_memory(settings.max_bytes, world.local_size, world.host, free))
    reduce, how = through_horovod(), (settings.repeats, settings.iterations, settings.seconds)
    chosen = sizes(settings.min_bytes, settings.max_bytes, settings.factor)
    return AllreduceResult(Facts.of(world), [measure_size(world, reduce, size, *how) for size in chosen])


def check_memory(largest: int, ranks: int, host: str, available: int) -> None:
    """UserError where the `ranks` ranks of a host cannot hold messages of `largest` bytes in `available` bytes."""
    needed = BUFFERS * largest * ranks
    if needed > available:
        raise UserError(
            f"all-reduces of {largest:,} bytes: {ranks} ranks of {host} need {needed / 2**30:,.1f} GiB for them, and "
            f"{available / 2**30:,.1f} GiB are free; give --max-bytes at most {available // (BUFFERS * ranks)}"
        )


def measure_size(
    world: World, reduce: Reduce, size: int, repeats: int, most_iterations: int = 1, seconds: float = 0.0
) -> AllreducePoint:
    """Measure all-reduces of `size` bytes for about `seconds`; a collective."""
    with tf.device(world.device):
        terms = tf.constant(terms_of(world.rank, size // WIDTH))
    sums: Any = None

    def time_of(iterations: int) -> float:
        """Seconds of one all-reduce: the mean over `iterations`, on the slowest rank."""
        nonlocal sums
        collectives.barrier()
        began = time.perf_counter()
        for _ in range(iterations):
            sums = reduce(terms)
        np.asarray(sums[-1:])  # waits for the device, and copies four bytes
        return max(collectives.all_gather_object((time.perf_counter() - began) / iterations))

    once = max(time_of(2), 1e-9)
    iterations = int(min(most_iterations, max(1.0, seconds / repeats / once)))
    taken = Estimate.of([time_of(iterations) for _ in range(repeats)])
    wrong = int((np.asarray(sums) != sums_of(world.size, size // WIDTH)).sum())
    return AllreducePoint(
        bytes=size,
        iterations=iterations * repeats,
        seconds=taken,
        algorithm_bandwidth=size / taken.mean,
        bus_bandwidth=size / taken.mean * 2 * (world.size - 1) / world.size,
        wrong_values=sum(collectives.all_gather_object(wrong)),
    )
