"""One training step: share, sum, apply.

A micro-batch's share is the sum of its examples' losses, divided by the number of examples in the global batch.
However the examples are divided, the shares of all micro-batches of all ranks add up to the global batch's mean loss,
and the gradients of the shares add up to its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed.batch_norm import examples_present, local_statistics
from hvd_cifar.distributed.optimizer import apply_and_sum, watch_gradients
from hvd_cifar.distributed.reduction import add_in_tree
from hvd_cifar.errors import UserError
from hvd_cifar.models import Net
from hvd_cifar.training.callbacks import StepObserver
from hvd_cifar.training.shrink import shrink

# No Python control flow depends on tensors, and without AutoGraph a rank starts 1.6 s sooner.
_graph = partial(tf.function, autograph=False)


@dataclass(frozen=True)
class StepSpec:
    """Settings of a step."""

    image_shape: tuple[int, int, int]  # height, width and channels of the step's input images
    weight_decay: float = 0.0  # factor of sum(w^2) / 2 over `net.decayed`, in the loss and so in the gradient
    label_smoothing: float = 0.0  # of `cross_entropy`
    micro_batches: int = 1  # that each rank computes in a step, one after the other
    # Number of micro-batches of all ranks in a step. Each starts from the same moving statistics of batch norm, and the
    # step averages their results. None: a rank's micro-batches update its moving statistics in turn.
    virtual_shards: int | None = None
    side: int | None = None  # height in pixels that the step first resizes images to; None: no resizing
    flags: int = 0  # how many numbers ranks send with the loss (`Progress.own_flags`)

    @property
    def is_one_graph(self) -> bool:
        """Whether a step is one graph, so that gradients leave during the backward pass.

        Else there is a graph for a micro-batch, so that its bits do not depend on how many a rank has, and one for the
        update after them.
        """
        return self.micro_batches == 1 and not self.virtual_shards


class Share(NamedTuple):
    """What a micro-batch adds to the global batch's results."""

    loss: Any  # a scalar
    penalty: Any  # the part of the loss beside the cross-entropy: weight decay, and losses that layers add
    gradients: list[Any]  # one for each trainable variable
    statistics: list[Any]  # under virtual shards the moving statistics after the micro-batch; else empty


class Averaging(StepObserver):
    """Averages of the weights (`optim.averages`), which follow each update."""

    def __init__(self, averages: Any) -> None:
        self.averages = averages

    def after_update(self) -> None:
        """Follow the weights."""
        self.averages.update()


def cross_entropy(labels: Any, logits: Any, smoothing: float = 0.0) -> Any:
    """Per-example cross-entropy [b] of int labels [b] and logits [b, classes], in float32 or better.

    With `smoothing` s the target is 1 - s on the label and s spread evenly over all classes (Szegedy et al. 2015).
    """
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    if not smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    target = tf.one_hot(labels, logits.shape[-1], 1.0 - smoothing, 0.0, dtype=logits.dtype)
    return tf.nn.softmax_cross_entropy_with_logits(target + smoothing / logits.shape[-1], logits)


def real_of(model: keras.Model) -> Any:
    """The type of a model's losses and sums."""
    return tf.float64 if model.compute_dtype == "float64" else tf.float32


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Copies of variables' current values, which later assignments do not change. Works in a graph."""
    return [tf.identity(v.value) for v in variables]


def _penalty(loss: Any, weight: Any, part: Any) -> Any:
    """A layer's own loss: its sum, as in Keras's `fit`.

    All shares add up to the sum over the global batch, if there is a loss of each example [b]. Of any other loss, such
    as a regularizer's, a micro-batch counts `part`, its fraction of the global batch.
    """
    if loss.shape.rank != 1 or loss.shape[0] is not None:
        return part * tf.reduce_sum(loss)
    return tf.cond(
        tf.size(loss) == tf.size(weight), lambda: tf.reduce_sum(loss * weight), lambda: part * tf.reduce_sum(loss)
    )


def make_share(net: Net, optimizer: Any, spec: StepSpec) -> Callable[..., Share]:
    """A function ((image, label, weight), count, start) -> Share of a micro-batch, for use in a graph.

    `weight` is 1 of an example and 0 of padding, `count` the number of examples in the global batch; `start` holds the
    local moving statistics before the micro-batch.
    """
    model, variables = net.model, net.model.trainable_variables
    real, statistics = real_of(model), local_statistics(model)
    decayed = net.decayed if spec.weight_decay else []
    undecayed = [v for v in variables if id(v) not in set(map(id, decayed))]

    def share_of(batch: Sequence[Any], count: Any, start: Sequence[Any]) -> Share:
        image, label, weight = batch
        if not spec.is_one_graph:  # virtual shards go back to the start; for others it is what they hold
            for statistic, before in zip(statistics, start, strict=True):
                statistic.assign(before)
        weight, count = tf.cast(weight, real), tf.cast(count, real)
        present = tf.reduce_sum(weight)
        if spec.side and spec.side != spec.image_shape[0]:
            image = shrink(tf.cast(image, real), spec.side)
        with examples_present(present > 0), tf.GradientTape() as tape:
            losses = tf.cast(cross_entropy(label, model(image, training=True), spec.label_smoothing), real)
            loss = tf.reduce_sum(losses * weight) / count
            penalties = [_penalty(tf.cast(added, real), weight, present / count) for added in model.losses]
            penalty = tf.add_n(penalties) if penalties else tf.zeros([], real)
            loss += penalty
            scaled = optimizer.scale_loss(loss)
        gradients = _dense(tape.gradient(scaled, [v.value for v in variables]), variables)
        if decayed:
            # In proportion to the micro-batch's examples, so that all shares add up to one weight decay.
            pull = present / count * spec.weight_decay
            decay = pull * tf.add_n([tf.cast(tf.nn.l2_loss(v.value), real) for v in decayed])
            loss, penalty = loss + decay, penalty + decay
            scaled_pull = tf.cast(optimizer.scale_loss(pull), real)
            index_of = {id(v): i for i, v in enumerate(variables)}
            for v in decayed:
                gradients[index_of[id(v)]] += tf.cast(scaled_pull, v.dtype) * v.value
        if undecayed:
            # TensorFlow's maximum, and its batch norm before a ReLU, hide a NaN from the loss, but the backward pass
            # carries it into a variable. Weight decay then makes the next loss NaN. Other variables are looked at here.
            sound = tf.math.is_finite(tf.add_n([tf.cast(tf.nn.l2_loss(v.value), real) for v in undecayed]))
            loss = tf.where(sound, loss, tf.constant(math.nan, real))
        # An empty micro-batch sends padding through the net, which must not change local statistics. Synchronised
        # layers leave it out by themselves (`examples_present`).
        for statistic, before in zip(statistics, start, strict=True):
            statistic.assign(tf.where(present > 0, statistic.value, before))
        return Share(loss, penalty, gradients, values_of(statistics) if spec.virtual_shards else [])

    return share_of


def _dense(found: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Gradients as tensors; 0 where the loss does not depend on a variable. UserError where it depends on none."""
    if variables and all(gradient is None for gradient in found):
        raise UserError(
            f"--model: no trainable variable has a gradient ({variables[0].path}, ...): the loss does not depend on "
            "them; take out what cannot be differentiated, such as a cast to integers or an argmax"
        )
    pairs = zip(variables, found, strict=True)
    return [tf.zeros_like(v.value) if gradient is None else tf.convert_to_tensor(gradient) for v, gradient in pairs]


def make_update(net: Net, optimizer: Any, spec: StepSpec, observers: Sequence[StepObserver]) -> Callable[..., Any]:
    """The end of a step, for use in a graph: sum the ranks' shares, and apply the sums.

    A function (share, learning_rate, flags) -> float [2 + spec.flags], as that of `make_train_step`.
    """
    variables, statistics = net.model.trainable_variables, local_statistics(net.model)

    def show_reduced(gradients: Sequence[Any]) -> None:
        for observer in observers:
            observer.on_reduced(gradients)

    if observers:
        watch_gradients(optimizer, show_reduced)  # instead of an equal one, of another image size

    def update(total: Share, learning_rate: Any, flags: Any) -> Any:
        numbers = tf.concat([[total.loss, total.penalty], tf.cast(flags, total.loss.dtype)], 0)
        optimizer.learning_rate.assign(learning_rate)
        for observer in observers:
            observer.on_gradients(total.gradients)
        # Horovod: sum gradients over the ranks and apply them. The same message sums the numbers and statistics.
        sums = apply_and_sum(optimizer, total.gradients, variables, [numbers, *total.statistics])
        for observer in observers:
            observer.on_sums(sums)
        for observer in observers:
            observer.after_update()
        if spec.virtual_shards:
            for statistic, summed in zip(statistics, sums[1:], strict=True):
                statistic.assign(summed / spec.virtual_shards)
        return sums[0]

    return update


def make_train_step(
    net: Net, optimizer: Any, spec: StepSpec, observers: Sequence[StepObserver] = ()
) -> Callable[..., Any]:
    """The step: a function (micro_batches, global_count, learning_rate, flags) -> float [2 + spec.flags].

    Its result is the same on every rank: the loss of the global batch (mean cross-entropy plus penalties; NaN if a
    variable is not finite), the penalties alone, and the sums over all ranks of `flags`, float32. They are reduced in
    the same message as the gradients. It may still be on the device.

    Args:
        optimizer: distributed with op "sum", since each rank's gradient is its share of the global one.
        observers: what watches the step, in their order.
    """
    real, statistics = real_of(net.model), local_statistics(net.model)
    share_of, update = make_share(net, optimizer, spec), make_update(net, optimizer, spec, observers)
    # One graph serves all batch sizes: tracing one for each would take seconds at the last step of an epoch.
    images, labels = tf.TensorSpec([None, *spec.image_shape], tf.float32), tf.TensorSpec([None], tf.int32)
    batch_types, count_type = [images, labels, tf.TensorSpec([None], tf.float32)], tf.TensorSpec([], tf.int32)

    add: Callable[..., Any] = partial(tf.nest.map_structure, tf.add)
    if not spec.is_one_graph:
        start = [tf.TensorSpec(s.shape, s.dtype) for s in statistics]
        share_of = _graph(share_of, input_signature=[batch_types, count_type, start])
        add, update = _graph(add), _graph(update)

    def step(micro_batches: Sequence[Sequence[Any]], count: Any, learning_rate: Any, flags: Any) -> Any:
        first = values_of(statistics)
        # Every virtual shard starts from the statistics before the step; other micro-batches from the previous one's.
        starts = (first if spec.virtual_shards else values_of(statistics) for _ in micro_batches)
        # Both are lazy: `add_in_tree` takes one share at a time, so a start is read after the share before it.
        shares = (share_of(batch, count, start) for batch, start in zip(micro_batches, starts, strict=True))
        return update(add_in_tree(shares, add), learning_rate, flags)

    if spec.is_one_graph:
        types = [[batch_types], count_type, tf.TensorSpec([], real), tf.TensorSpec([spec.flags], tf.float32)]
        step = _graph(step, input_signature=types)

    def call(micro_batches: Sequence[MicroBatch], count: Any, rate: float, flags: Any) -> Any:
        batches = [[b.image, b.label, b.weight] for b in micro_batches]
        return step(batches, count, tf.constant(rate, real), flags)

    return call
