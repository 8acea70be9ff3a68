"""Examples -> batches: the input of a rank as one chain of tf.data."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.data.augment import Views, draws
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.sampler import Sampler

PREFETCH_BATCHES = 4  # enough to hide a slow batch; more only costs memory


@tf.autograph.experimental.do_not_convert
def training_batches(
    examples: Examples, views: Views, sampler: Sampler, *, first_step: int, last_step: int, device: str = ""
) -> tf.data.Dataset:
    """A rank's micro-batches of steps first_step .. last_step - 1, over as many epochs as that takes.

    Args:
        examples: the whole training set, gathered from by index.
        sampler: which examples the rank uses, by seed, global batch and shard.
        device: where to stage batches, such as "/GPU:0"; empty: leave them in host memory.

    Returns:
        A dataset of (image float32 [b, height, width, channels], label int32 [b], weight float32 [b], example
        int64 [b]), with `sampler.sharding.micro_batches` elements per global step on every rank. b varies by one where
        the shards do not divide the batch. A micro-batch without an example is one example of weight 0 (`example` is
        then -1).
    """
    sharding = sampler.sharding
    of_all = sharding.micro_batches * sharding.size  # micro-batches of a global batch

    def view(number: Any) -> tuple[Any, ...]:
        kinds = [tf.float32, tf.int32, tf.float32, tf.int64]
        image, label, weight, example = tf.numpy_function(gather, [number], kinds)
        image.set_shape([None, *views.shape])
        for column in (label, weight, example):
            column.set_shape([None])
        return image, label, weight, example

    @_counted
    def gather(number: np.int64) -> tuple[NDArray[Any], ...]:
        epoch, example = sampler.micro_batch(int(number) // sharding.size)
        present = np.maximum(example, 0)
        image = views.train(examples.images[present], draws(sampler.seed, epoch, present))
        return image, examples.labels[present], (example >= 0).astype(np.float32), example

    # The shard is one of micro-batches, which are as many for every rank, and not of examples: a dataset that walks
    # over the examples of all ranks takes longer, at 64 ranks, than all else here together.
    chain = (
        tf.data.Dataset.range(first_step * of_all, max(first_step, last_step) * of_all)  # of all ranks and epochs
        .shard(sharding.size, sharding.rank)  # this rank's
        .map(view)  # gathered and augmented, one at a time, since the cores belong to the step
        .prefetch(PREFETCH_BATCHES)
    )
    chain = chain.with_options(_options())
    return chain.apply(tf.data.experimental.prefetch_to_device(device)) if device else chain


def in_steps(batches: Iterable[Any], micro_batches: int) -> Iterator[list[Any]]:
    """The elements of a dataset by step, `micro_batches` at a time."""
    elements = iter(batches)
    while step := list(islice(elements, micro_batches)):
        yield step


@tf.autograph.experimental.do_not_convert
def evaluation_batches(
    examples: Examples, views: Views, *, batch_size: int, rank: int, size: int, count: int | None = None
) -> tf.data.Dataset:
    """A rank's shard of a set, every example once, in plain view.

    Args:
        count: evaluate on the first `count` examples only; None: on all.

    Returns:
        A dataset of (image float32 [b, height, width, channels], label int32 [b]) with b <= batch_size. Ranks may have
        different numbers of batches, or none: evaluation reduces sums once, at its end.
    """

    def view(index: Any) -> tuple[Any, Any]:
        image, label = tf.numpy_function(gather, [index], [tf.float32, tf.int32])
        return tf.ensure_shape(image, [None, *views.shape]), tf.ensure_shape(label, [None])

    @_counted
    def gather(index: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        return views.test(examples.images[index]), examples.labels[index]

    every = len(examples)
    return (
        tf.data.Dataset.range(every if count is None else min(count, every))
        .shard(size, rank)
        .batch(batch_size)
        .map(view)
        .prefetch(PREFETCH_BATCHES)
        .with_options(_options())
    )


class _Makers:
    """How many batches the threads of this process have made, and are making."""

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
    """Wait until every pipeline of this process has filled its buffer: none has made a batch for so many seconds.

    Where Python ends earlier, with an unfinished iterator, TensorFlow waits for the thread that makes batches, and
    holds Python's lock meanwhile; a thread that asks for the lock at that moment waits for ever.
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
