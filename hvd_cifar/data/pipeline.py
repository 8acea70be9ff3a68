"""Examples -> batches: the input of a rank, made by one thread a few batches ahead."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hvd_cifar.data.augment import CROPS, Transforms, draws
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.pictures import CROP_DRAWS
from hvd_cifar.data.sampler import PADDING, Sampler
from hvd_cifar.errors import UserError

MOST_THREADS = 8  # that cut and resize pictures; while batches are ahead of the step, one at most works
PREFETCH_BATCHES = 4  # enough to hide a slow batch; more only costs memory

N = TypeVar("N")
T = TypeVar("T")


class MicroBatch(NamedTuple):
    """The examples that a rank computes at a time."""

    image: Any  # float32 [b, height, width, channels], transformed for training
    label: Any  # int32 [b]
    weight: Any  # float32 [b]: 1, or 0 for padding
    example: Any  # int64 [b], indices into the data set's training part; `sampler.PADDING` for padding


def ahead(make: Callable[[N], T], numbers: Iterable[N], threads: int = 1) -> Iterator[T]:
    """What `make` makes of each number, in order, made a few ahead by `threads`, each of which makes one at a time.

    Raises UserError of `make`, such as a file that has become unreadable; other ranks may not have this error.
    """
    waiting: deque[Future[T]] = deque()
    with ThreadPoolExecutor(threads, "batches") as pool:
        try:
            for number in numbers:
                waiting.append(pool.submit(make, number))
                if len(waiting) >= PREFETCH_BATCHES + threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except UserError as error:
            error.of_one_rank = True
            raise


def training_batches(
    examples: Examples, transforms: Transforms, sampler: Sampler, *, first_step: int, last_step: int, device: str = ""
) -> Iterator[MicroBatch]:
    """A rank's micro-batches of steps first_step .. last_step - 1, over as many epochs as that takes.

    For each global step every rank has `sampler.micro_batches`, whose b varies by one where the shards do not
    divide the batch. They are staged on `device`, such as "/GPU:0"; empty: in host memory.
    """
    crops = getattr(examples.images, "crops", None) if transforms.crops else None

    def make(number: int) -> MicroBatch:
        epoch, example = sampler.micro_batch(number)
        present = np.maximum(example, 0)
        if crops:
            images = crops(present, draws(sampler.seed, epoch, present, CROPS, CROP_DRAWS)[:, :-1])
        else:
            images = examples.images[present]
        image = transforms.train(images, draws(sampler.seed, epoch, present))
        is_there = example >= 0
        if examples.numbers is not None:
            example = np.where(is_there, examples.numbers[present], PADDING)
        with tf.device(device or "/CPU:0"):
            weight = is_there.astype(np.float32)
            return MicroBatch(*map(tf.constant, (image, examples.labels[present], weight, example)))

    per_step = sampler.micro_batches
    # Not for objects of the user's, which several threads may not call at once.
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0))) if crops else 1
    return ahead(make, range(first_step * per_step, last_step * per_step), threads)


def evaluation_batches(
    examples: Examples, transforms: Transforms, *, batch_size: int, rank: int, size: int
) -> Iterator[tuple[Any, Any]]:
    """A rank's shard of a set, `rank`, `rank + size`, ..., by the test transform: (float32 [b, ...], labels int32 [b]).

    Ranks may have different numbers of batches, or none: evaluation reduces sums once, at its end.
    """
    shard = np.arange(rank, len(examples), size)

    def make(first: int) -> tuple[Any, Any]:
        index = shard[first : first + batch_size]
        with tf.device("/CPU:0"):
            return tf.constant(transforms.test(examples.images[index])), tf.constant(examples.labels[index])

    return ahead(make, range(0, len(shard), batch_size))
