"""`benchmark allreduce`: time, bandwidth and correctness of all-reduces by size, in the terms of nccl-tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.reduction import Reduction
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.runtime.world import World, session
from hvd_cifar.tools.benchmark.results import Result, estimate, facts, shown, tell
from hvd_cifar.tools.settings import BenchmarkAllreduceSettings

WIDTH = 4  # bytes of a float32, the smallest message
REPEATS, SECONDS = 5, 0.3  # measurements of a size, and about how long all of them take
MOST_ITERATIONS = 100  # all-reduces in one measurement
# Terms are small whole numbers: float32 holds their sum over 80,000 ranks exactly, in any order.
RANK_FACTORS = 16
PATTERN = 13

Reduce = Callable[[Any], Any]  # this rank's terms -> the sums over the ranks


@dataclass(frozen=True)
class Point:
    """All-reduces of one size. Bandwidths are in bytes a second; wrong_values: over all ranks."""

    bytes: int
    iterations: int
    seconds: Result
    algorithm_bandwidth: float
    bus_bandwidth: float  # the same, times 2 (p - 1) / p
    wrong_values: int


def benchmark_allreduce(settings: BenchmarkAllreduceSettings) -> None:
    """Measure all-reduces on all ranks of this job. UserError for one rank, TrainingError where a sum is wrong."""
    if (launched_size() or 1) == 1:
        raise UserError("one rank alone has nothing to reduce; start more (-np 2)")
    with session() as world:
        reduce = through_horovod()
        points = [measure_size(world, reduce, size) for size in sizes(settings.max_bytes, settings.factor)]
        found = {"facts": facts(world), "points": [asdict(point) for point in points]}
        collectives.on_root(lambda: tell(table(points), found, settings.json_file))
        judge(points)


def judge(points: Sequence[Point]) -> None:
    """TrainingError where a value is wrong, naming the first size."""
    wrong = [p for p in points if p.wrong_values]
    if wrong:
        others = f", and of {len(wrong) - 1} more sizes" if len(wrong) > 1 else ""
        raise TrainingError(
            f"wrong sums: {wrong[0].wrong_values:,} values of an all-reduce of {wrong[0].bytes:,} bytes{others}; "
            "do not train over this network or MPI"
        )


def table(points: Sequence[Point]) -> str:
    """A row a size."""
    rows: list[Sequence[str]] = [("bytes", "us", "algorithm GB/s", "bus GB/s", "wrong")]
    for p in points:
        rates = (f"{rate / 1e9:.3f}" for rate in (p.algorithm_bandwidth, p.bus_bandwidth))
        rows.append((f"{p.bytes:,}", shown(p.seconds, 1, 1e6), *rates, str(p.wrong_values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(["all-reduce of float32", *lines])


def sizes(most: int, factor: int) -> list[int]:
    """Bytes of the messages: one float32 value, each `factor` times the one before, and `most` at the end."""
    found, size = {most // WIDTH * WIDTH}, WIDTH
    while size < most:
        found.add(size)
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


def measure_size(world: World, reduce: Reduce, size: int, repeats: int = REPEATS, seconds: float = SECONDS) -> Point:
    """Measure all-reduces of `size` bytes for about `seconds`; a collective, with the same result on every rank.

    Wrong sums do not end the measurement; the result counts them.
    """
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
    iterations = int(min(MOST_ITERATIONS, max(1.0, seconds / repeats / once)))
    taken = estimate([time_of(iterations) for _ in range(repeats)])
    rate = size / taken["mean"]
    wrong = int((np.asarray(sums) != sums_of(world.size, size // WIDTH)).sum())
    all_wrong = sum(collectives.all_gather_object(wrong))
    return Point(size, iterations * repeats, taken, rate, rate * 2 * (world.size - 1) / world.size, all_wrong)
