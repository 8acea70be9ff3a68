"""Batch normalisation with the statistics of the global batch: a layer, and the conversion of a model's own layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

from . import collectives
from .keras_classes import put_in_front

# A Keras model passes only `training` and `mask` on to its layers, so a context variable carries this flag to them. It
# is no attribute of a layer, since it belongs to one call.
_present: ContextVar[Any] = ContextVar("present", default=True)
_Layer: Any = object  # the layer's own class comes after `Synchronized`


@contextmanager
def examples_present(flag: Any) -> Iterator[None]:
    """In this block synchronised layers leave this rank's batch out of the statistics if `flag`, a boolean, is false.

    A rank without an example computes the step on a placeholder: no convolution takes an empty batch on the CPU.
    """
    token = _present.set(flag)
    try:
        yield
    finally:
        _present.reset(token)


class Synchronized(_Layer):
    """The class in front of a batch norm layer's own; it replaces the layer's computation in training.

    Sums are of the inputs minus the moving mean, which is the same on all ranks: the variance is then a difference of
    small numbers (Chan, Golub, LeVeque 1983, "shifted data").
    """

    _unbiased = False  # whether the moving variance takes n / (n - 1) times the batch's

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        """Inputs of any number of dimensions -> the same shape; with `training` a collective."""
        if not training or not self.trainable:
            return super().call(inputs, training=False)
        real = tf.float64 if inputs.dtype == tf.float64 else tf.float32
        rank = inputs.shape.rank
        axis = getattr(self, "axis", -1) % rank
        channels, others = inputs.shape[axis], [i for i in range(rank) if i != axis]
        along = [channels if i == axis else 1 for i in range(rank)]
        moving_mean, moving_variance = tf.cast(self.moving_mean, real), tf.cast(self.moving_variance, real)

        shifted = counted = tf.cast(inputs, real) - tf.reshape(moving_mean, along)
        count = tf.cast(tf.reshape(tf.size(inputs) // channels, [1]), real)
        if mask is not None:
            counted = tf.where(mask[..., None], shifted, tf.zeros([], real))
            count = tf.reshape(tf.reduce_sum(tf.cast(mask, real)), [1])
        own = tf.concat([tf.reduce_sum(counted, others), tf.reduce_sum(tf.square(counted), others), count], axis=0)
        # Sums and counts, not means: ranks of unequal batches then compute what one rank with all examples would.
        sums = collectives.all_reduce_in_graph(own * tf.cast(_present.get(), real), "statistics")
        total = tf.maximum(sums[-1], 1.0)  # 0 where no rank has an example
        mean = sums[:channels] / total  # of the inputs minus the moving mean
        variance = tf.maximum(sums[channels:-1] / total - tf.square(mean), 0.0)  # rounding may leave it below 0

        step = (1.0 - self.momentum) * tf.minimum(sums[-1], 1.0)  # 0 where no rank has an example
        learnt = variance * total / tf.maximum(total - 1.0, 1.0) if self._unbiased else variance
        self.moving_mean.assign(moving_mean + step * mean)
        self.moving_variance.assign(moving_variance + step * (learnt - moving_variance))
        scale = tf.math.rsqrt(variance + self.epsilon)
        if self.gamma is not None:
            scale = tf.cast(self.gamma, real) * scale
        output = (shifted - tf.reshape(mean, along)) * tf.reshape(scale, along)
        if self.beta is not None:
            output += tf.reshape(tf.cast(self.beta, real), along)
        return tf.cast(output, self.compute_dtype)


@keras.saving.register_keras_serializable("hvd_cifar")
class SyncBatchNormalization(Synchronized, keras.layers.BatchNormalization):
    """Batch normalisation by the mean and variance of all ranks' examples together (Ioffe and Szegedy 2015).

    One all-reduce of 2 c + 1 numbers gives the count of the global batch's inputs, their sum and the sum of their
    squares; the gradient is another. Every rank must call the layer equally often: with `training`, it is a collective.

    Arguments, weights and saved form are those of `keras.layers.BatchNormalization`; some defaults differ. The moving
    variance averages unbiased variances, as in TensorFlow's fused kernel.
    """

    _unbiased = True

    def __init__(self, momentum: float = 0.9, epsilon: float = 1e-5, **kwargs: Any) -> None:
        super().__init__(momentum=momentum, epsilon=epsilon, **kwargs)
        _refuse_renorm(self)


def convert_sync_batch_norm(model: keras.Model) -> int:
    """Make every batch norm layer of a model compute its training statistics over all ranks' examples together.

    The layers themselves change, also in nested models; weights, their names, evaluation and the saved model stay the
    same. The moving variance stays of biased variances in Keras's layer, of unbiased ones in a class that sets
    `averages_unbiased_variances`. Convert before `compile` and before the first training step: a graph that is already
    traced keeps the statistics of each rank. Every rank must make the same calls with `training`: they are collectives.

    Returns the number of layers converted, without those that were before. Raises ValueError where a layer has
    `renorm=True`, and converts none.
    """
    found = local_layers(model)
    for layer in found:
        _refuse_renorm(layer)
    for layer in found:
        put_in_front(Synchronized, layer, _unbiased=_averages_unbiased(layer))
    return len(found)


def local_layers(model: keras.Model) -> list[Any]:
    """The batch norm layers of a model that take their training statistics over their own rank's examples."""
    kind = keras.layers.BatchNormalization
    found = [layer for layer in model._flatten_layers() if isinstance(layer, kind) or _averages_unbiased(layer)]
    return [layer for layer in found if not isinstance(layer, Synchronized)]


def synchronised_layers(model: keras.Model) -> list[Any]:
    """The batch norm layers of a model that take their training statistics over all ranks' examples."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Synchronized)]


def _averages_unbiased(layer: Any) -> bool:
    return getattr(layer, "averages_unbiased_variances", False)


def _refuse_renorm(layer: Any) -> None:
    if getattr(layer, "renorm", False):
        raise ValueError(f"{layer.name} has renorm=True, whose statistics cannot be synchronised: set renorm=False")


def moving_statistics(model: keras.Model) -> list[keras.Variable]:
    """The moving statistics of all batch norm layers: means, variances, and what Keras's renorm adds."""
    norms = [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]
    theirs = {id(v) for layer in norms for v in layer._non_trainable_variables}  # not a frozen gamma and beta
    names = ("/moving_mean", "/moving_variance")  # of a layer of the user's own also
    return [v for v in model.non_trainable_variables if v.path.endswith(names) or id(v) in theirs]


def local_statistics(model: keras.Model) -> list[keras.Variable]:
    """The moving statistics that differ between ranks: those of layers that are not synchronised."""
    synchronised = {id(v) for layer in synchronised_layers(model) for v in layer.variables}
    return [v for v in moving_statistics(model) if id(v) not in synchronised]
