"""One training step: forward, loss, backward, all-reduce, update.

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

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed.batch_norm import examples_present, synchronised_layers
from hvd_cifar.distributed.collectives import broadcast_variables, random_states
from hvd_cifar.distributed.fixed_order import add_in_tree
from hvd_cifar.distributed.optimizer import apply_and_sum, process_set_of
from hvd_cifar.models import Net
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.training.plan import Plan
from hvd_cifar.training.record import Record
from hvd_cifar.training.shrink import shrink
from hvd_cifar.training.step_times import StepTimes

# No Python control flow depends on tensors, and without AutoGraph a rank starts 1.6 s sooner.
_graph = partial(tf.function, autograph=False)


@dataclass(frozen=True)
class StepSpec:
    """Settings of a step.

    Attributes:
        image_shape: height, width and channels of the step's input images.
        weight_decay: factor of sum(w^2) / 2 over `net.decayed`, in the loss and so in the gradient.
        label_smoothing: of `cross_entropy`.
        micro_batches: number that each rank computes in a step, one after the other.
        virtual_shards: number of micro-batches of all ranks in a step. Each starts from the same moving statistics of
            batch norm, and the step averages their results. None: a rank's micro-batches update its moving statistics
            in turn.
        side: height in pixels that the step first resizes images to; None: no resizing.
        skips: whether a step is undone if it makes the loss, a weight or a value of the optimizer infinite or NaN.
    """

    image_shape: tuple[int, int, int]
    weight_decay: float = 0.0
    label_smoothing: float = 0.0
    micro_batches: int = 1
    virtual_shards: int | None = None
    side: int | None = None
    skips: bool = False


class Share(NamedTuple):
    """What a micro-batch adds to the global batch's results.

    loss: a scalar.
    penalty: the part of the loss beside the cross-entropy: weight decay, and losses that layers add.
    gradients: one for each trainable variable.
    statistics: under virtual shards the moving statistics after the micro-batch; else empty.
    """

    loss: Any
    penalty: Any
    gradients: list[Any]
    statistics: list[Any]


class Notes(NamedTuple):
    """What a rank sends to the others with a step's loss. All ranks get the sums.

    stop: 1 asks all ranks to stop.
    save: 1 asks for a checkpoint.
    seconds: rank 0's recent seconds per step, from which all ranks derive when to fetch results; 0 on other ranks.
    news: 1 on rank 0 if results of validation ranks have arrived.
    """

    stop: float = 0.0
    save: float = 0.0
    seconds: float = 0.0
    news: float = 0.0


class Probes(NamedTuple):
    """What observes a step; None: not used.

    times: records when gradients and their sums are ready.
    record: copies gradients and activations of marked steps.
    """

    times: StepTimes | None = None
    record: Record | None = None


class TrainStep:
    """The step of a run. The step's number determines its count of examples, learning rate and image size."""

    def __init__(self, make: Callable[[int], Callable[..., Any]], sizes: ImageSizes, schedule: Schedule, plan: Plan):
        """`make`: builds the step for one side of `sizes`; see `make_train_step`."""
        self._steps = {side: make(side) for side in sizes.sides}
        self._sizes = sizes
        self._schedule = schedule
        self._plan = plan

    def __call__(self, step: int, micro_batches: Sequence[MicroBatch], rate_factor: float, notes: Notes) -> Any:
        """Make the next step after `step` finished ones.

        Args:
            step: number of finished steps.
            micro_batches: this rank's micro-batches of the next step.
            rate_factor: multiplies the schedule's learning rate.
            notes: of this rank.

        Returns:
            What the function of `make_train_step` returns. It may still be on the device.
        """
        count = tf.constant(self._plan.examples_in_step(step))
        learning_rate = self._schedule(step) * rate_factor
        return self._steps[self._sizes(step)](micro_batches, count, learning_rate, tf.constant(notes, tf.float32))


def cross_entropy(labels: Any, logits: Any, smoothing: float = 0.0) -> Any:
    """Per-example cross-entropy [b] of int labels [b] and logits [b, classes], in float32 or better.

    With `smoothing` s the target is 1 - s on the label and s spread evenly over all classes (Szegedy et al. 2015).
    """
    logits = tf.cast(logits, tf.float64 if logits.dtype == tf.float64 else tf.float32)
    if not smoothing:
        return tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    target = tf.one_hot(labels, logits.shape[-1], 1.0 - smoothing, 0.0, dtype=logits.dtype)
    return tf.nn.softmax_cross_entropy_with_logits(target + smoothing / logits.shape[-1], logits)


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


def real_of(model: keras.Model) -> Any:
    """The type of a model's losses and sums."""
    return tf.float64 if model.compute_dtype == "float64" else tf.float32


def micro_batch_signature(spec: StepSpec) -> list[Any]:
    """The types of a micro-batch's image, label and weight, and of the global count.

    One graph serves all batch sizes. With a graph for each size, ranks with different batch sizes would give a
    collective different names.
    """
    examples = [tf.TensorSpec([None, *spec.image_shape], tf.float32), tf.TensorSpec([None], tf.int32)]
    return [*examples, tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32)]


def _penalty(loss: Any, weight: Any, part: Any) -> Any:
    """A layer's own loss: its sum, as in Keras's `fit`.

    All shares add up to the sum over the global batch, if there is a loss of each example [b]. Of any other loss, such
    as a regularizer's, a micro-batch counts its part.
    """
    if loss.shape.rank != 1 or loss.shape[0] is not None:
        return part * tf.reduce_sum(loss)
    return tf.cond(
        tf.size(loss) == tf.size(weight), lambda: tf.reduce_sum(loss * weight), lambda: part * tf.reduce_sum(loss)
    )


def make_share(net: Net, optimizer: Any, spec: StepSpec, record: Record | None = None) -> Callable[..., Share]:
    """The computation of a micro-batch's `Share`, for use in a graph. Activations go to `record`.

    Returns:
        A function (image, label, weight, global_count, start) -> Share; `start` holds the local moving statistics
        before the micro-batch.
    """
    model, variables = net.model, net.model.trainable_variables
    real, statistics = real_of(model), local_statistics(model)
    index_of = {id(v): i for i, v in enumerate(variables)}
    decayed = net.decayed if spec.weight_decay else []
    watched = [v for v in variables if id(v) not in set(map(id, decayed))]
    forward = record.model if record else model

    def share_of(image: Any, label: Any, weight: Any, count: Any, start: Sequence[Any]) -> Share:
        weight, count = tf.cast(weight, real), tf.cast(count, real)
        present = tf.reduce_sum(weight)
        if spec.side not in (None, *spec.image_shape[:1]):
            image = shrink(tf.cast(image, real), spec.side)
        with examples_present(present > 0), tf.GradientTape() as tape:
            outputs = forward(image, training=True)
            logits, *activations = outputs if isinstance(outputs, list) else [outputs]
            losses = tf.cast(cross_entropy(label, logits, spec.label_smoothing), real)
            share = tf.reduce_sum(losses * weight) / count
            penalties = [_penalty(tf.cast(loss, real), weight, present / count) for loss in model.losses]
            penalty = tf.add_n(penalties) if penalties else tf.zeros([], real)
            share += penalty
            scaled = optimizer.scale_loss(share)
        found = tape.gradient(scaled, [v.value for v in variables], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradients = [tf.convert_to_tensor(gradient) for gradient in found]
        if decayed:
            # In proportion to the micro-batch's examples, so that all shares add up to one weight decay.
            pull = present / count * spec.weight_decay
            decay = pull * tf.add_n([tf.cast(tf.nn.l2_loss(v.value), real) for v in decayed])
            share, penalty = share + decay, penalty + decay
            pull = tf.cast(optimizer.scale_loss(pull), real)
            for v in decayed:
                gradients[index_of[id(v)]] += tf.cast(pull, v.dtype) * v.value
        if watched:
            # TensorFlow's maximum, and its batch norm before a ReLU, hide a NaN from the loss, but the backward pass
            # carries it into a variable. Weight decay then makes the next loss NaN. Variables without it need this.
            sound = tf.math.is_finite(tf.add_n([tf.cast(tf.nn.l2_loss(v.value), real) for v in watched]))
            share = tf.where(sound, share, tf.constant(math.nan, real))
        # An empty micro-batch sends padding through the net, which must not change local statistics. Synchronised
        # layers leave it out by themselves (`examples_present`).
        for statistic, before in zip(statistics, start, strict=True):
            statistic.assign(tf.where(present > 0, statistic.value, before))
        if record:
            record.keep_activations(activations)
        return Share(
            share, penalty, gradients, [tf.identity(s.value) for s in statistics] if spec.virtual_shards else []
        )

    return share_of


def values_of(variables: Sequence[Any]) -> list[Any]:
    """Copies of variables' current values, which later assignments do not change. Works in a graph."""
    return [tf.identity(v.value) for v in variables]


class Guard:
    """Undoes a step whose loss, weights or optimizer values are not finite (--on-nan skip).

    Ranks have the same loss, weights and optimizer, so all decide the same without a message. A gradient that overflows
    under loss scaling leaves weights and loss finite: the optimizer halves the scale, and the step does not count as
    skipped.
    """

    def __init__(self, model: keras.Model, optimizer: Any, averages: Sequence[Any]) -> None:
        drawn = set(map(id, random_states(model)))  # not undone: generators advance as in any other step
        self._of_forward = [v for v in model.non_trainable_variables if id(v) not in drawn]
        self._shared = [*model.trainable_variables, *optimizer.variables]
        self._of_update = [*self._shared, *(v for average in averages for v in average.variables)]
        self._averages = averages

    def before_step(self) -> list[Any]:
        """The values that a forward pass changes."""
        return values_of(self._of_forward)

    def before_update(self) -> list[Any]:
        """The values that an update changes."""
        return values_of(self._of_update)

    def undo_bad(self, results: Any, kept: Sequence[Any]) -> Any:
        """Put `kept` back if the step is bad. Return its results [loss, ...]; a bad step's loss is not finite."""
        floating = [v.value for v in self._shared if tf.as_dtype(v.dtype).is_floating]
        sound = [tf.reduce_all(tf.math.is_finite(value)) for value in floating]
        is_good = tf.reduce_all(tf.stack([tf.math.is_finite(results[0]), *sound]))

        def put_back() -> None:
            for variable, value in zip((*self._of_forward, *self._of_update), kept, strict=True):
                variable.assign(value)
            for average in self._averages:
                average.skip()

        tf.cond(is_good, lambda: None, put_back)
        loss = tf.where(is_good | ~tf.math.is_finite(results[0]), results[0], math.nan)
        return tf.concat([[loss], results[1:]], 0)


def make_train_step(
    net: Net,
    optimizer: Any,
    spec: StepSpec,
    averages: Sequence[Any] = (),
    probes: Probes | None = None,
    from_root: Sequence[Any] = (),
) -> Callable[..., Any]:
    """Build the step.

    Args:
        net: its model is trained.
        optimizer: distributed with op "sum", since each rank's gradient is its share of the global one.
        spec: what the step computes.
        averages: of the weights (`optim.averages`), updated after them.
        probes: what observes the step.
        from_root: variables that all ranks take from rank 0 after the update (`training.unlike`).

    Returns:
        A function (micro_batches, global_count, learning_rate, notes) -> float [6], the same on every rank: the loss
        of the global batch (mean cross-entropy plus penalties; NaN if a variable is not finite; not finite if the step
        was skipped), the penalties alone, and the sums over all ranks of `notes`, float32 [4] as in `Notes`. They are
        reduced in the same message as the gradients.
    """
    times, record = probes or Probes()
    variables = net.model.trainable_variables
    real, statistics = real_of(net.model), local_statistics(net.model)
    share_of = make_share(net, optimizer, spec, record)
    guard = Guard(net.model, optimizer, averages) if spec.skips else None

    def update(share: Share, learning_rate: Any, notes: Any, before: Sequence[Any]) -> Any:
        kept = [*before, *guard.before_update()] if guard else []
        own = [tf.concat([[share.loss, share.penalty], tf.cast(notes, share.loss.dtype)], 0), *share.statistics]
        optimizer.learning_rate.assign(learning_rate)
        if times:
            times.gradients_are(share.gradients)
        # Horovod: sum gradients over the ranks and apply them; loss and notes are in the same message.
        loss_and_notes, *totals = apply_and_sum(optimizer, share.gradients, variables, own)
        if times:
            times.sums_are([loss_and_notes, *totals])
        if from_root:
            if times:
                times.update_is(values_of(from_root))
            broadcast_variables(from_root, process_set=process_set_of(optimizer))
            if times:
                times.root_is(values_of(from_root))
        for average in averages:
            average.update()
        if spec.virtual_shards:
            for statistic, total in zip(statistics, totals, strict=True):
                statistic.assign(total / spec.virtual_shards)
        return guard.undo_bad(loss_and_notes, kept) if guard else loss_and_notes

    of_micro_batch = micro_batch_signature(spec)

    if spec.micro_batches == 1 and not spec.virtual_shards:
        notes_of = tf.TensorSpec([len(Notes._fields)], tf.float32)

        @_graph(input_signature=[*of_micro_batch, tf.TensorSpec([], real), notes_of])
        def whole_step(image: Any, label: Any, weight: Any, count: Any, learning_rate: Any, notes: Any) -> Any:
            start, before = values_of(statistics), guard.before_step() if guard else []
            return update(share_of(image, label, weight, count, start), learning_rate, notes, before)

        def step_of_one(micro_batches: Sequence[MicroBatch], count: Any, rate: float, notes: Any) -> Any:
            (batch,) = micro_batches
            return whole_step(batch.image, batch.label, batch.weight, count, tf.constant(rate, real), notes)

        return step_of_one

    # Two graphs: one for a micro-batch, the same however many a rank has, and one for the update after them.
    start_of = [tf.TensorSpec(s.shape, s.dtype) for s in statistics]

    @_graph(input_signature=[*of_micro_batch, start_of])
    def share_from(image: Any, label: Any, weight: Any, count: Any, start: Sequence[Any]) -> Share:
        for statistic, before in zip(statistics, start, strict=True):
            statistic.assign(before)
        return share_of(image, label, weight, count, start)

    add = _graph(lambda one, other: tf.nest.map_structure(tf.add, one, other))
    update_in_graph = _graph(update)

    def share_of_all(micro_batches: Sequence[MicroBatch], count: Any) -> Any:
        first = values_of(statistics)
        # Every virtual shard starts from the statistics before the step; other micro-batches from the previous one's.
        shares = (
            share_from(b.image, b.label, b.weight, count, first if spec.virtual_shards else values_of(statistics))
            for b in micro_batches
        )
        return add_in_tree(shares, add)

    def step_of_several(micro_batches: Sequence[MicroBatch], count: Any, rate: float, notes: Any) -> Any:
        before = guard.before_step() if guard else []
        return update_in_graph(share_of_all(micro_batches, count), tf.constant(rate, real), notes, before)

    return step_of_several
