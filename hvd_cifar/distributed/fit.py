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

__all__ = ["EarlyStopping", "evaluate", "predict", "together"]
T = TypeVar("T")


class EarlyStopping(keras.callbacks.EarlyStopping):
    """Keras's EarlyStopping by the mean of the monitored value over the ranks, which stop after the same epoch."""

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
        x: inputs [n, ...], or a tuple, list or dictionary of such; the same on every rank, as `y` and the weights [n].
        batch_size: of each rank.
    """
    count, (own_x, own_y, own_weight) = _shard((x, y, sample_weight))
    model.evaluate(own_x, own_y, batch_size, verbose=0, sample_weight=own_weight)
    if not count:
        model.reset_metrics()
    variables = model.metrics_variables
    sums = all_reduce_sums(np.concatenate([np.ravel(v.numpy()) for v in variables]).tolist())
    ends = np.cumsum([np.prod(v.shape, dtype=int) for v in variables])
    for variable, values in zip(variables, np.split(sums, ends[:-1]), strict=True):
        variable.assign(values.reshape(variable.shape).astype(variable.dtype))
    return {name: float(value) for name, value in model.get_metrics_result().items()}


def predict(model: keras.Model, x: Any, batch_size: int = 32) -> Any:
    """The model's outputs for all inputs, each computed by one rank; every rank gets all of them.

    `x` and `batch_size` are as for `evaluate`; the outputs are arrays [n, ...], in the structure of the model's.
    """
    count, own = _shard(x)
    outputs = model.predict(own, batch_size, verbose=0)
    return keras.tree.map_structure(lambda rows: hvd.allgather(rows[:count]).numpy(), outputs)


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


def _shard(arrays: Any) -> tuple[int, Any]:
    """The number of this rank's neighbouring rows of arrays, and the rows; where it has none, one: Keras takes no 0."""
    length = len(keras.tree.flatten(arrays)[0])
    first, last = (length * rank // hvd.size() for rank in (hvd.rank(), hvd.rank() + 1))
    some = slice(first, last) if last > first else slice(0, 1)
    rows = keras.tree.map_structure(lambda array: None if array is None else tf.convert_to_tensor(array[some]), arrays)
    return last - first, rows
