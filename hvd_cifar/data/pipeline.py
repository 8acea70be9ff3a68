"""Examples -> batches: the input of a rank, made by one thread a few batches ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hvd_cifar.data.augment import Transforms, crop_draws, draws
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.sampler import PADDING, Sampler
from hvd_cifar.errors import UserError

MOST_THREADS = 8  # that cut and resize pictures; while batches are ahead of the step, one at most works
PREFETCH_BATCHES = 4  # enough to hide a slow batch; more only costs memory

T = TypeVar("T")


class MicroBatch(NamedTuple):
    """The examples that a rank computes at a time.

    Attributes:
        image: float32 [b, height, width, channels], transformed for training.
        label: int32 [b].
        weight: float32 [b]: 1, or 0 for padding.
        example: int64 [b], indices into the data set's training part; `sampler.PADDING` for padding.
    """

    image: Any
    label: Any
    weight: Any
    example: Any


@dataclass(frozen=True)
class Batches(Generic[T]):
    """Batches that are made ahead while they are iterated over, which may be done several times.

    Attributes:
        make: number -> a batch.
        numbers: of the batches, in order.
        threads: that make batches, a batch each; one by default: the other cores belong to the step.
    """

    make: Callable[[int], T]
    numbers: Sequence[int]
    threads: int = 1

    def __len__(self) -> int:
        return len(self.numbers)

    def __iter__(self) -> Iterator[T]:
        """Raises UserError where a file has become unreadable; other ranks may not have this error."""
        ahead: deque[Future[T]] = deque()
        with ThreadPoolExecutor(self.threads, "batches") as pool:
            try:
                for number in self.numbers:
                    ahead.append(pool.submit(self.make, number))
                    if len(ahead) >= PREFETCH_BATCHES + self.threads:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            except UserError as error:
                error.of_one_rank = True
                raise


def training_batches(
    examples: Examples, transforms: Transforms, sampler: Sampler, *, first_step: int, last_step: int, device: str = ""
) -> Batches[MicroBatch]:
    """A rank's micro-batches of steps first_step .. last_step - 1, over as many epochs as that takes.

    Args:
        examples: the whole training set, gathered from by index.
        sampler: which examples the rank uses, by seed, global batch and shard.
        device: where to stage batches, such as "/GPU:0"; empty: leave them in host memory.

    Returns:
        `sampler.sharding.micro_batches` micro-batches for each global step on every rank. b varies by one where the
        shards do not divide the batch. A micro-batch without an example has one of padding.
    """

    crops = getattr(examples.images, "crops", None) if transforms.crops else None

    def make(number: int) -> MicroBatch:
        epoch, example = sampler.micro_batch(number)
        present = np.maximum(example, 0)
        images = crops(present, crop_draws(sampler.seed, epoch, present)) if crops else examples.images[present]
        image = transforms.train(images, draws(sampler.seed, epoch, present))
        is_there = example >= 0
        if examples.numbers is not None:
            example = np.where(is_there, examples.numbers[present], PADDING)
        with tf.device(device or "/CPU:0"):
            weight = is_there.astype(np.float32)
            return MicroBatch(*map(tf.constant, (image, examples.labels[present], weight, example)))

    per_step = sampler.sharding.micro_batches
    # Not for objects of the user's, which several threads may not call at once.
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0))) if crops else 1
    return Batches(make, range(first_step * per_step, last_step * per_step), threads)


def evaluation_batches(
    examples: Examples, transforms: Transforms, *, batch_size: int, rank: int, size: int
) -> Batches[tuple[Any, Any]]:
    """A rank's shard of a set, every example once: `rank`, `rank + size`, ..., as the test transform makes them.

    Returns:
        Batches of (image float32 [b, height, width, channels], label int32 [b]) with b <= batch_size. Ranks may have
        different numbers of batches, or none: evaluation reduces sums once, at its end.
    """
    shard = np.arange(rank, len(examples), size)

    def make(first: int) -> tuple[Any, Any]:
        index = shard[first : first + batch_size]
        with tf.device("/CPU:0"):
            return tf.constant(transforms.test(examples.images[index])), tf.constant(examples.labels[index])

    return Batches(make, range(0, len(shard), batch_size))
