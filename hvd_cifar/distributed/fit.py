"""What a program with Keras's `fit` needs on several ranks beside averaged gradients.

All functions are collectives: every rank calls them, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from .collectives import all_gather_object, all_reduce_sums

T = TypeVar("T")


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's EarlyStopping by the mean of the monitored value over the ranks, so that all stop after the same epoch.

    Arguments are Keras's. With `restore_best_weights` every rank restores the weights of the same epoch.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Decide. A collective."""
        values = [value for value in all_gather_object((logs or {}).get(self.monitor)) if value is not None]
        agreed = {self.monitor: float(np.mean(values))} if values else {}
        super().on_epoch_end(epoch, {**(logs or {}), **agreed})


def evaluate(model: keras.Model, x: Any, y: Any, sample_weight: Any = None, batch_size: int = 32) -> dict[str, float]:
    """Loss and metrics of a compiled model over all examples, each evaluated by one rank, as one process finds them.

    Sums and counts inside Keras's metrics are added over the ranks. That is right for all metrics whose variables are
    sums over examples or batches, as those of Keras are: means, counts, confusion matrices, AUC.

    Args:
        x: inputs [n, ...], or a tuple, list or dictionary of such; the same on every rank, as are the next two.
        y: targets [n, ...].
        sample_weight: [n].
        batch_size: of each rank.

    Returns:
        Values by name, the same on every rank.
    """
    first, last = _shard(_length(x))
    some = slice(first, last) if last > first else slice(0, 1)  # Keras takes no empty array
    weight = None if sample_weight is None else sample_weight[some]
    model.evaluate(_rows(x, some), _rows(y, some), batch_size, verbose=0, sample_weight=weight)
    if last == first:
        model.reset_metrics()
    variables = model.metrics_variables
    sums = iter(all_reduce_sums(np.concatenate([np.ravel(v.numpy()) for v in variables]).tolist()))
    for variable in variables:
        count = int(np.prod(variable.shape))
        variable.assign(np.reshape([next(sums) for _ in range(count)], variable.shape).astype(variable.dtype))
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def predict(model: keras.Model, x: Any, batch_size: int = 32) -> Any:
    """The model's outputs for all inputs, each computed by one rank; every rank gets all of them.

    Args:
        x: inputs [n, ...], or a tuple, list or dictionary of such; the same on every rank.
        batch_size: of each rank.

    Returns:
        Arrays [n, ...], in the structure of the model's outputs.
    """
    first, last = _shard(_length(x))
    some = slice(first, last) if last > first else slice(0, 1)
    own = model.predict(_rows(x, some), batch_size, verbose=0)
    return keras.tree.map_structure(lambda rows: hvd.allgather(rows[: last - first]).numpy(), own)


def steps_per_epoch(batches: int) -> int:
    """The smallest number of batches that a rank has, for `fit`: with other numbers ranks would wait for each other."""
    return min(all_gather_object(batches))


def together(batches: Iterable[T]) -> Iterator[tuple[T, float]]:
    """This rank's batches, each with 1.0, and then its last one with 0.0, until no rank has a further one.

    Multiply the batch's part of the loss by the number. Ranks with other numbers of batches then take equally many
    steps, and every example counts once. One number is all-reduced for each batch.

    Raises:
        ValueError: where this rank has no batch at all.
    """
    last = None
    for batch in batches:
        all_reduce_sums([1.0])
        last = [batch]
        yield batch, 1.0
    while all_reduce_sums([0.0]) != [0.0]:
        if last is None:
            raise ValueError(f"rank {hvd.rank()} has no batch: give every rank at least one")
        yield last[0], 0.0


def _shard(count: int) -> tuple[int, int]:
    """This rank's neighbouring rows of `count`."""
    return count * hvd.rank() // hvd.size(), count * (hvd.rank() + 1) // hvd.size()


def _length(x: Any) -> int:
    return len(keras.tree.flatten(x)[0])


def _rows(x: Any, some: slice) -> Any:
    return keras.tree.map_structure(lambda array: tf.convert_to_tensor(array[some]), x)
