"""Forms of the training step that may be faster on a GPU, each a switch that can be combined with others.

The product's step is `training.step`; none of these is. Each form computes the same function as that step, up to
rounding, and has the same bits on 1, 2, 4, ... ranks with virtual shards and a fixed order of addition.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.distributed import buckets
from hvd_cifar.distributed.batch_norm import local_statistics
from hvd_cifar.distributed.reduction import Reduction, add_in_tree
from hvd_cifar.models import Net
from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.layers import FusedBatchNormalization, narrow, widen
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.optim.muon import Muon, orthogonal
from hvd_cifar.training.step import cross_entropy, real_of

_graph = partial(tf.function, autograph=False)
_xla = partial(tf.function, autograph=False, jit_compile=True)


@dataclass(frozen=True)
class Switches:
    """What a form of the step changes."""

    xla: bool = False  # forward and backward pass are one XLA computation; collectives and update stay outside
    xla_update: bool = False  # the update is one XLA computation
    flat_update: bool = False  # the optimizer updates one vector of all weights, whose pieces are copied into the net's
    one_buffer: bool = False  # the net reads its weights out of that vector, whose gradient is the message
    one_square: bool = False  # weight decay and the check for NaN take their sums from one vector
    no_layout: bool = False  # TensorFlow's layout optimizer, which turns NHWC into NCHW, is off
    # Batch norm in NHWC, one XLA computation forward and one backward. TensorFlow's kernel turns float32 into NCHW.
    nhwc_norm: bool = False
    constant_rate: bool = False  # the learning rate is a constant of the graph
    steps: int = 1  # made by one call, on batches that wait on the device


# The forms that are measured, by name. The first has no switch: it shows what this module itself costs.
FORMS = {
    "no switch": Switches(),
    "xla": Switches(xla=True),
    "flat update": Switches(flat_update=True),
    "one square": Switches(one_square=True),
    "no layout optimizer": Switches(no_layout=True),
    "NHWC batch norm": Switches(nhwc_norm=True),
    "NHWC throughout": Switches(no_layout=True, nhwc_norm=True),
    "constant rate": Switches(constant_rate=True),
    "4 steps a call": Switches(steps=4),
    "one buffer": Switches(one_buffer=True),
    "all": Switches(
        xla=True, xla_update=True, one_buffer=True, no_layout=True, nhwc_norm=True, constant_rate=True, steps=4
    ),
}


class Step:
    """A form of the step for a net, which it trains. Calls belong in the block of `settings`.

    `shards`: micro-batches of all ranks in a step, whose moving statistics are averaged; None: one for each rank.
    """

    def __init__(
        self,
        net: Net,
        recipe: Recipe,
        switches: Switches,
        rate: float,
        shards: int | None = None,
        reduction: Reduction | None = None,
        total_steps: int = 1000,
    ) -> None:
        self.net, self.recipe, self.switches, self.rate, self.shards = net, recipe, switches, rate, shards
        self.reduction = reduction or Reduction(average=False)
        self.variables = net.model.trainable_variables
        self.statistics = local_statistics(net.model)
        self.real = real_of(net.model)
        decayed = {id(v) for v in net.decayed} if recipe.weight_decay else set()
        self.decays = [id(v) in decayed for v in self.variables]
        self.is_flat = switches.flat_update or switches.one_buffer
        self.weights = self.variables
        self.optimizer = recipe.optimizer(rate)
        if self.is_flat:
            vector = buckets.flat([v.value for v in self.variables])
            self.weights = [keras.Variable(vector, dtype=vector.dtype, name="weights")]
            if isinstance(self.optimizer, Muon):
                self.optimizer.build(self.variables)
                self.optimizer = FlatMuon(self.optimizer, self.variables)
        self.optimizer.build(self.weights)
        if switches.constant_rate:
            rates = tf.constant(rate, self.optimizer.learning_rate.dtype)
            object.__setattr__(self.optimizer, "_get_current_learning_rate", lambda: rates)
        self.averages: list[Any] = [Lookahead(self.weights, total_steps)] if recipe.lookahead else []
        self.averages += [MovingAverage(self.weights, recipe.ema_decay)] if recipe.ema_decay else []
        # With virtual shards no part is merged with another: TensorFlow would join the sums of a rank's shards into
        # one, in another order than the ranks'.
        apart = partial(tf.function, autograph=False, experimental_attributes={"_noinline": True})
        plain: Any = apart if shards else lambda function: function
        self._share = (_xla if switches.xla else plain)(self._share_of)
        self._update = (_xla if switches.xla_update else plain)(self._updated)
        self._add = plain(lambda one, other: tf.nest.map_structure(tf.add, one, other))
        self._call = _graph(self._steps if switches.steps > 1 else self._one)

    def __call__(self, batches: Sequence[Sequence[Any]], count: Any) -> Any:
        """Make a step, or `steps`, of global batches of `count`; the last one's loss, which may still be on the device.

        `batches`: (image, label, weight) of each of this rank's micro-batches; with `steps` above 1, as `staged` makes
        them.
        """
        return self._call(*self._arguments(batches, count))

    def trace(self, batches: Sequence[Sequence[Any]], count: Any) -> None:
        """Make the graph of a call with such arguments."""
        self._call.get_concrete_function(*self._arguments(batches, count))

    def _arguments(self, batches: Sequence[Sequence[Any]], count: Any) -> tuple[Any, Any, Any]:
        return [list(batch) for batch in batches], count, tf.constant(self.rate, self.real)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """TensorFlow as this form needs it, while it is traced and called."""
        with ExitStack() as stack:
            if self.switches.no_layout:
                before = tf.config.optimizer.get_experimental_options()
                tf.config.optimizer.set_experimental_options({"layout_optimizer": False})
                kept = before.get("layout_optimizer", True)
                stack.callback(tf.config.optimizer.set_experimental_options, {"layout_optimizer": kept})
            if self.switches.nhwc_norm:
                stack.enter_context(mock.patch.object(FusedBatchNormalization, "call", norm_in_nhwc))
            if self.switches.xla:  # XLA knows none of the CPU's own convolutions
                stack.enter_context(mock.patch.object(QuickConv2D, "_kernel_for", lambda *_: None))
            yield

    def values(self) -> list[Any]:
        """The weights as arrays, in the order and shapes of the net's."""
        return [value.numpy() for value in (self._pieces(self.weights[0].value) if self.is_flat else self.variables)]

    def _pieces(self, vector: Any) -> list[Any]:
        parts = tf.split(vector, [math.prod(v.shape) for v in self.variables])
        return [tf.reshape(part, v.shape) for part, v in zip(parts, self.variables, strict=True)]

    def _steps(self, batches: list[Any], count: Any, rate: Any) -> Any:
        def body(i: Any, _: Any) -> Any:
            return i + 1, self._one(tf.nest.map_structure(lambda staged: staged[i], batches), count, rate)

        begin = [tf.constant(0), tf.zeros([], self.real)]
        return tf.while_loop(lambda i, _: i < self.switches.steps, body, begin, parallel_iterations=1)[1]

    def _one(self, batches: list[Any], count: Any, rate: Any) -> Any:
        one_buffer = self.switches.one_buffer
        weights = [tf.identity(v.value) for v in (self.weights if one_buffer else self.variables)]
        start = [tf.identity(s.value) for s in self.statistics]
        shares = (self._share(weights, start, batch, count) for batch in batches)
        loss, gradients, statistics = add_in_tree(shares, self._add)
        own = [loss, *statistics] if self.shards else [loss]
        if one_buffer:  # the gradient is a message of its own, which nothing copies
            reduced = self.reduction.reduce(gradients) + self.reduction.reduce(own)
        else:
            reduced = self.reduction.reduce([*gradients, *own])
        gradients, (loss, *totals) = reduced[: len(gradients)], reduced[len(gradients) :]
        if self.shards:
            statistics = [total / self.shards for total in totals]
        for statistic, value in zip(self.statistics, statistics, strict=True):
            statistic.assign(value)
        if not self.switches.constant_rate:
            self.optimizer.learning_rate.assign(rate)
        self._update(gradients)
        for average in self.averages:
            average.update()
        if self.is_flat and not one_buffer:
            for variable, piece in zip(self.variables, self._pieces(self.weights[0].value), strict=True):
                variable.assign(piece)
        return loss

    def _updated(self, gradients: list[Any]) -> None:
        self.optimizer.apply(gradients, self.weights)

    def _share_of(self, weights: list[Any], start: list[Any], batch: list[Any], count: Any) -> Any:
        """A micro-batch's loss, gradients and moving statistics, as `training.step.make_share` computes them."""
        image, label, weight = batch
        weight, count = tf.cast(weight, self.real), tf.cast(count, self.real)
        with tf.GradientTape() as tape:
            tape.watch(weights)
            values = self._pieces(weights[0]) if self.switches.one_buffer else weights
            given = zip([*self.variables, *self.statistics], [*values, *start], strict=True)
            with keras.StatelessScope(list(given)) as scope:
                logits = self.net.model(image, training=True)
            losses = tf.cast(cross_entropy(label, logits, self.recipe.label_smoothing), self.real)
            loss = tf.reduce_sum(losses * weight) / count
        gradients = tape.gradient(loss, weights)
        pull = tf.reduce_sum(weight) / count * self.recipe.weight_decay
        vector = weights[0]
        if self.switches.one_square and not self.switches.one_buffer:
            vector = buckets.flat(weights)
        if self.switches.one_square or self.switches.one_buffer:
            squares = tf.square(vector)
            sound = tf.math.is_finite(tf.reduce_sum(squares))
            decay = tf.reduce_sum(squares * self._mask()) / 2 if any(self.decays) else 0.0
        else:
            sums = [tf.cast(tf.nn.l2_loss(v), self.real) for v in weights]
            parts = {way: [s for s, d in zip(sums, self.decays, strict=True) if d == way] for way in (True, False)}
            sound = tf.math.is_finite(tf.add_n(parts[False])) if parts[False] else tf.constant(True)
            decay = tf.add_n(parts[True]) if parts[True] else 0.0
        loss = tf.where(sound, loss + pull * decay, tf.constant(math.nan, self.real))
        if any(self.decays) and self.switches.one_buffer:
            gradients = [gradients[0] + tf.cast(pull, vector.dtype) * self._mask() * vector]
        elif any(self.decays):
            gradients = [
                g + tf.cast(pull, w.dtype) * w if decays else g
                for g, w, decays in zip(gradients, weights, self.decays, strict=True)
            ]
        if self.is_flat and not self.switches.one_buffer:
            gradients = [buckets.flat(gradients)]
        after = [scope.get_current_value(s) for s in self.statistics]
        return loss, gradients, after

    def _mask(self) -> Any:
        return spread(map(float, self.decays), self.variables)


def staged(batches: Sequence[Any], steps: int) -> Any:
    """(image, label, weight) of `steps` equal steps, with a first dimension of as many where there is more than one."""
    return batches if steps == 1 else tf.nest.map_structure(lambda value: tf.stack([value] * steps), batches)


def spread(values: Iterable[float], variables: Sequence[Any]) -> Any:
    """A vector as long as all variables, with one value for each variable: [n]."""
    sizes = [math.prod(v.shape) for v in variables]
    return tf.constant(np.repeat([*values], sizes), variables[0].dtype)


class FlatMuon(keras.optimizers.Optimizer):
    """Muon on one vector of all variables; kernels of one shape are made orthogonal together."""

    def __init__(self, muon: Muon, variables: Sequence[Any]) -> None:
        super().__init__(learning_rate=float(muon.learning_rate), name="flat_muon")
        self._muon = (muon, tuple(variables))  # within a tuple, which Keras does not track

    def build(self, variables: Sequence[Any]) -> None:
        """Make the velocity."""
        super().build(variables)
        self.velocity = self.add_variable_from_reference(variables[0], name="velocity")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Apply the gradient of all variables, [n]."""
        muon, variables = self._muon
        matrices, others = muon._is_matrix, muon._of_variable
        momenta = [muon.momentum if matrix else muon.momentum_of_others for matrix in matrices]
        momentum = spread(momenta, variables)
        value = tf.convert_to_tensor(variable)
        decays = [0.0 if matrix else decay for matrix, (_, decay) in zip(matrices, others, strict=True)]
        gradient = gradient + spread(decays, variables) * value if any(decays) else gradient
        moved = momentum * tf.convert_to_tensor(self.velocity) + gradient
        factors = [1.0 if matrix else factor for matrix, (factor, _) in zip(matrices, others, strict=True)]
        update = spread(factors, variables) * (gradient + momentum * moved)
        sizes = [math.prod(v.shape) for v in variables]
        updates, values = tf.split(update, sizes), tf.split(value, sizes)
        shapes = {tuple(v.shape) for v, matrix in zip(variables, matrices, strict=True) if matrix}
        for shape in sorted(shapes):
            chosen = [i for i, v in enumerate(variables) if matrices[i] and tuple(v.shape) == shape]
            together = tf.reshape(tf.stack([updates[i] for i in chosen]), [-1, *shape])
            made = tf.reshape(tf.vectorized_map(lambda k: orthogonal(k, muon.steps), together), [len(chosen), -1])
            columns = shape[-1]
            if not muon.resets_norms:
                made *= 0.2 * max(columns, math.prod(shape) // columns) ** 0.5
            for i, one in zip(chosen, tf.unstack(made, len(chosen)), strict=True):
                updates[i] = one
                if muon.resets_norms:
                    length = tf.cast(columns, value.dtype) ** 0.5
                    values[i] = values[i] * tf.math.divide_no_nan(length, tf.norm(values[i]))
        self.assign(self.velocity, moved)
        rate = tf.cast(learning_rate, value.dtype)
        self.assign(variable, tf.concat(values, 0) - rate * tf.concat(updates, 0))


def norm_in_nhwc(layer: FusedBatchNormalization, images: Any, training: bool = False) -> Any:
    """`FusedBatchNormalization.call` by `_norm_forward` and `_norm_backward`."""
    if not training:
        raise ValueError("only for training")

    @tf.custom_gradient
    def norm(x: Any, gamma: Any, beta: Any) -> Any:
        y, mean, variance = _norm_forward(x, gamma, beta, layer.epsilon)

        def gradient(upstream: Any, *_: Any) -> Any:
            return _norm_backward(x, upstream, gamma, mean, variance, layer.epsilon)

        return (y, tf.stop_gradient(mean), tf.stop_gradient(variance)), gradient

    y, mean, variance = norm(images, tf.convert_to_tensor(layer.gamma), tf.convert_to_tensor(layer.beta))
    count = tf.cast(tf.size(images) / tf.shape(images)[-1], variance.dtype)
    unbiased = variance * count / tf.maximum(count - 1.0, 1.0)
    for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, unbiased)):
        old = tf.convert_to_tensor(moving)
        moving.assign(old + (1.0 - layer.momentum) * (new - old))
    return y


@_xla
def _norm_forward(x: Any, gamma: Any, beta: Any, epsilon: float) -> Any:
    wide = widen(x)
    mean, variance = tf.nn.moments(wide, [0, 1, 2])
    return narrow((wide - mean) * (gamma * tf.math.rsqrt(variance + epsilon)) + beta, x.dtype), mean, variance


@_xla
def _norm_backward(x: Any, upstream: Any, gamma: Any, mean: Any, variance: Any, epsilon: float) -> Any:
    wide, up = widen(x), widen(upstream)
    inverse = tf.math.rsqrt(variance + epsilon)
    normal = (wide - mean) * inverse
    of_beta, of_gamma = tf.reduce_sum(up, [0, 1, 2]), tf.reduce_sum(up * normal, [0, 1, 2])
    count = tf.cast(tf.size(x) / tf.shape(x)[-1], wide.dtype)
    of_x = gamma * inverse * (up - of_beta / count - normal * (of_gamma / count))
    return narrow(of_x, x.dtype), of_gamma, of_beta
