"""Examples -> batches: the input of a rank as one chain of tf.data."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.data.augment import Transforms, draws
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.sampler import PADDING, Sampler

PREFETCH_BATCHES = 4  # enough to hide a slow batch; more only costs memory


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


@tf.autograph.experimental.do_not_convert
def training_batches(
    examples: Examples, transforms: Transforms, sampler: Sampler, *, first_step: int, last_step: int, device: str = ""
) -> tf.data.Dataset:
    """A rank's micro-batches of steps first_step .. last_step - 1, over as many epochs as that takes.

    Args:
        examples: the whole training set, gathered from by index.
        sampler: which examples the rank uses, by seed, global batch and shard.
        device: where to stage batches, such as "/GPU:0"; empty: leave them in host memory.

    Returns:
        A dataset of `MicroBatch`, with `sampler.sharding.micro_batches` elements per global step on every rank. b
        varies by one where the shards do not divide the batch. A micro-batch without an example has one of padding.
    """
    sharding = sampler.sharding
    per_step = sharding.micro_batches * sharding.size  # micro-batches of a global batch, over all ranks

    def micro_batch(number: Any) -> MicroBatch:
        batch = MicroBatch(*tf.numpy_function(gather, [number], [tf.float32, tf.int32, tf.float32, tf.int64]))
        batch.image.set_shape([None, *transforms.shape])
        for column in (batch.label, batch.weight, batch.example):
            column.set_shape([None])
        return batch

    @_counted
    def gather(number: np.int64) -> tuple[NDArray[Any], ...]:
        epoch, example = sampler.micro_batch(int(number) // sharding.size)
        present = np.maximum(example, 0)
        image = transforms.train(examples.images[present], draws(sampler.seed, epoch, present))
        is_there = example >= 0
        if examples.numbers is not None:
            example = np.where(is_there, examples.numbers[present], PADDING)
        return image, examples.labels[present], is_there.astype(np.float32), example

    # The chain counts micro-batches, not examples: at 64 ranks, walking over the examples of all ranks takes longer
    # than the rest of the chain.
    chain = (
        tf.data.Dataset.range(first_step * per_step, max(first_step, last_step) * per_step)  # of all ranks and epochs
        .shard(sharding.size, sharding.rank)  # this rank's
        .map(micro_batch)  # one at a time: the cores belong to the step
        .prefetch(PREFETCH_BATCHES)
    )
    chain = chain.with_options(_options())
    return chain.apply(tf.data.experimental.prefetch_to_device(device)) if device else chain


@tf.autograph.experimental.do_not_convert
def evaluation_batches(
    examples: Examples,
    transforms: Transforms,
    *,
    batch_size: int,
    rank: int,
    size: int,
    chosen: NDArray[np.int64] | None = None,
) -> tf.data.Dataset:
    """A rank's shard of a set, every example once: `rank`, `rank + size`, ..., as the test transform makes them.

    Args:
        chosen: indices int64 [n] of the examples to evaluate on; None: all.

    Returns:
        A dataset of (image float32 [b, height, width, channels], label int32 [b]) with b <= batch_size. Ranks may have
        different numbers of batches, or none: evaluation reduces sums once, at its end.
    """

    def batch(index: Any) -> tuple[Any, Any]:
        image, label = tf.numpy_function(gather, [index], [tf.float32, tf.int32])
        return tf.ensure_shape(image, [None, *transforms.shape]), tf.ensure_shape(label, [None])

    @_counted
    def gather(index: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        index = index if chosen is None else chosen[index]
        return transforms.test(examples.images[index]), examples.labels[index]

    return (
        tf.data.Dataset.range(len(examples) if chosen is None else len(chosen))
        .shard(size, rank)
        .batch(batch_size)
        .map(batch)
        .prefetch(PREFETCH_BATCHES)
        .with_options(_options())
    )


class _Makers:
    """How many batches the threads of this process are making, and have made."""

    lock = threading.Lock()
    busy = 0
    made = 0


def _counted(make: Callable[..., Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        with _Makers.lock:
            _Makers.busy += 1
        try:
            return make(*args)
        finally:
            with _Makers.lock:
                _Makers.busy -= 1
                _Makers.made += 1

    return counted


@atexit.register
def settle(seconds: float = 0.05) -> None:
    """Wait until every pipeline of this process has filled its buffer: none has made a batch for `seconds`.

    Python must not end before that. At its end TensorFlow waits for the thread that makes batches while it holds
    Python's lock; if that thread asks for the lock at that moment, both wait for ever.
    """
    made = -1
    while _Makers.busy or made != _Makers.made:
        made = _Makers.made
        time.sleep(seconds)


def _options() -> tf.data.Options:
    options = tf.data.Options()
    options.deterministic = True
    # The pipeline is part of its rank's share of the cores: it must not start a thread for every core of the host.
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    return options
