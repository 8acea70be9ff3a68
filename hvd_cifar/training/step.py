"""One training step: forward, loss, backward, all-reduce, update, in one graph.

Everything is a sum over examples divided by the global count, so that it does not matter how the examples of a global
batch are dealt to ranks and micro-batches: the sum of all shares is the gradient of the global batch's mean loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.distributed import sync
from hvd_cifar.models import Net


def cross_entropy(labels: Any, logits: Any) -> Any:
    """Per-example cross-entropy [b] of int labels [b] and logits [b, classes], in float32 or better."""
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)


def make_train_step(
    net: Net,
    optimizer: Any,
    *,
    weight_decay: float,
    micro_batches: int,
    averages: MovingAverage | None = None,
) -> Callable[..., Any]:
    """Build the step.

    Args:
        net: its model is trained.
        optimizer: distributed with op "sum": it adds up the ranks' shares of the global gradient.
        weight_decay: factor of sum(w^2) / 2 over `net.decayed`, in the loss and so in the gradient.
        micro_batches: slices in which a rank goes through its batch, one after the other, to save memory.
        averages: moving averages to update after the weights, or None.

    Returns:
        A function (image [b, side, side, 3], label [b], weight [b], global_count, learning_rate, request) -> float [2],
        the same on every rank: the loss of the global batch (mean cross-entropy plus weight decay), and the sum of the
        ranks' `request`s, by which they agree on a checkpoint without a collective of its own.
    """
    model, variables = net.model, net.model.trainable_variables
    real = tf.float64 if model.compute_dtype == "float64" else tf.float32

    def shares_of(image: Any, label: Any, weight: Any, global_count: Any) -> tuple[Any, list[Any]]:
        """This slice's share of the mean cross-entropy, and of its gradient."""
        with tf.GradientTape() as tape:
            entropy = cross_entropy(label, model(image, training=True))
            share = tf.reduce_sum(entropy * tf.cast(weight, entropy.dtype)) / tf.cast(global_count, entropy.dtype)
            scaled = optimizer.scale_loss(share)
        return share, tape.gradient(scaled, [v.value for v in variables])

    def shares_in_slices(image: Any, label: Any, weight: Any, global_count: Any) -> tuple[Any, list[Any]]:
        count = tf.shape(label)[0]
        slices = tf.minimum(micro_batches, count)  # no slice is empty

        def add_slice(i: Any, share: Any, gradients: list[Any]) -> tuple[Any, Any, list[Any]]:
            part = slice(i * count // slices, (i + 1) * count // slices)
            more, grown = shares_of(image[part], label[part], weight[part], global_count)
            return i + 1, share + more, [g + tf.convert_to_tensor(h) for g, h in zip(gradients, grown, strict=True)]

        start = (tf.constant(0), tf.zeros([], real), [tf.zeros_like(v.value) for v in variables])
        # One at a time: slices side by side would take the memory that slicing saves.
        _, share, gradients = tf.while_loop(lambda i, *_: i < slices, add_slice, start, parallel_iterations=1)
        return share, gradients

    def decay(fraction: Any) -> Any:
        """This rank's share of the weight decay's loss: by its examples, so that the shares add up to one whole."""
        total = tf.add_n([tf.cast(tf.nn.l2_loss(v.value), real) for v in net.decayed])
        return fraction * weight_decay * total

    index_of = {id(v): i for i, v in enumerate(variables)}

    @tf.function(reduce_retracing=True)
    def train_step(image: Any, label: Any, weight: Any, global_count: Any, learning_rate: Any, request: Any) -> Any:
        find_shares = shares_of if micro_batches == 1 else shares_in_slices
        share, gradients = find_shares(image, label, weight, global_count)
        if weight_decay:
            fraction = tf.cast(tf.reduce_sum(weight), real) / tf.cast(global_count, real)
            share += decay(fraction)
            pull = tf.cast(optimizer.scale_loss(fraction * weight_decay), real)
            for v in net.decayed:
                i = index_of[id(v)]
                gradients[i] += tf.cast(pull, v.dtype) * v.value
        # Horovod: the loss travels beside the gradients, in the same cycle and the same buffer.
        loss_and_requests = sync.sum_in_graph(tf.stack([share, tf.cast(request, share.dtype)]))
        optimizer.learning_rate.assign(learning_rate)
        optimizer.apply(gradients, variables)
        if averages is not None:
            averages.update()
        return loss_and_requests

    return train_step


class MovingAverage:
    """Exponential moving averages of variables, as TensorFlow's tutorial keeps them for evaluation.

    average <- d * average + (1 - d) * value, with d = min(decay, (1 + n) / (10 + n)) after n updates, so that the first
    averages are not mostly initial weights (tf.train.ExponentialMovingAverage with num_updates).
    """

    def __init__(self, variables: list[keras.Variable], decay: float) -> None:
        self.sources = variables
        self.decay = decay
        self.updates = keras.Variable(0, dtype="int64", trainable=False, name="ema_updates")
        self.values = [
            keras.Variable(v.numpy(), dtype=v.dtype, trainable=False, name=f"ema_{i}") for i, v in enumerate(variables)
        ]

    @property
    def variables(self) -> list[keras.Variable]:
        """Everything that has to be saved, restored and broadcast."""
        return [self.updates, *self.values]

    def update(self) -> None:
        """Take in the variables' present values. Works in a graph."""
        self.updates.assign_add(1)
        n = tf.cast(self.updates.value, tf.float64)
        rest = 1.0 - tf.minimum(tf.constant(self.decay, tf.float64), (1.0 + n) / (10.0 + n))
        for average, source in zip(self.values, self.sources, strict=True):
            average.value.assign_sub((average.value - source.value) * tf.cast(rest, average.dtype))

    def swap(self) -> None:
        """Exchange the variables with their averages; a second call puts them back."""
        for average, source in zip(self.values, self.sources, strict=True):
            kept = source.numpy()
            source.assign(average.value)
            average.assign(kept)
