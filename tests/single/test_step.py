"""The step on one rank without Horovod: the smallest images, and a NaN's way to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import nets
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.models import Net
from hvd_cifar.training import step as step_module
from hvd_cifar.training.callbacks import StepObserver
from hvd_cifar.training.step import StepSpec, make_train_step


class _Recorder:
    """An optimizer that notes the gradients it is given."""

    def __init__(self) -> None:
        self.learning_rate = keras.Variable(0.0)
        self.gradients: list[Any] = []
        self._watch: Any = None

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        assert len(gradients) == len(variables)
        self.gradients = list(gradients)
        if self._watch:
            self._watch(self.gradients)


@pytest.fixture(autouse=True)
def on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Horovod: nothing to sum up over."""

    def apply_and_sum(optimizer: Any, gradients: Any, variables: Any, values: Any) -> list[Any]:
        optimizer.apply(gradients, variables)
        return list(values)

    monkeypatch.setattr(step_module, "apply_and_sum", apply_and_sum)


@pytest.mark.parametrize(("side", "precision"), [(9, "float32"), (17, "mixed_bfloat16")])
def test_fast_trains_on_the_smallest_images(side: int, precision: str) -> None:
    """Of batches of any size, as in a run: what the graph does not know of a shape, a layer must not ask it."""
    optimizer = _Recorder()
    spec = StepSpec((32, 32, 3), side=side)
    net = nets.build("fast", precision=precision)
    step = make_train_step(net, optimizer, spec)
    batch = MicroBatch(tf.zeros((2, 32, 32, 3)), tf.zeros((2,), tf.int32), tf.ones((2,)), tf.range(2))
    specs = [(tf.TensorSpec((None, *value.shape[1:]), value.dtype)) for value in batch]

    def one_step(*parts: Any) -> Any:
        return step([MicroBatch(*parts)], tf.constant(2), 0.1, tf.zeros(0))

    loss, *_ = tf.function(one_step, input_signature=specs)(*batch)
    assert np.isfinite(loss)
    assert len(optimizer.gradients) == len(net.model.trainable_variables)
    for gradient, variable in zip(optimizer.gradients, net.model.trainable_variables, strict=True):
        assert gradient.shape == variable.shape


class _Descent(_Recorder):
    """What a gradient has, its variable gets."""

    def __init__(self, rate: float = 0.001) -> None:
        super().__init__()
        self.rate = rate

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(self.rate * gradient)


@pytest.mark.parametrize(
    ("name", "precision"), [("tutorial", "float32"), ("resnet8", "float32"), ("fast", "mixed_bfloat16")]
)
def test_a_nan_shows_in_the_loss(name: str, precision: str) -> None:
    """In the next one at the latest, although TensorFlow's maxima and its batch norm with a ReLU let none through."""
    net = nets.build(name, precision=precision)
    step = make_train_step(net, _Descent(), StepSpec((32, 32, 3), weight_decay=0.001))
    images = np.random.default_rng(3).normal(size=(4, 32, 32, 3)).astype(np.float32)
    start = [variable.numpy() for variable in net.model.variables]

    def loss() -> float:
        batch = MicroBatch(tf.constant(images), tf.constant([1, 2, 3, 4]), tf.ones((4,)), tf.range(4))
        return float(step([batch], tf.constant(4), 0.1, tf.zeros(0))[0])

    assert np.isfinite([loss(), loss()]).all()
    images[2, 5, 7, 1] = np.nan
    loss()
    images[2, 5, 7, 1] = 0.0
    assert np.isnan(loss())
    for spoilt in net.model.trainable_variables:
        for variable, value in zip(net.model.variables, start, strict=True):
            variable.assign(np.full_like(value, np.nan) if variable is spoilt else value)
        assert np.isnan(loss()), spoilt.path


def _batches(sizes: Sequence[int], images: Any, labels: Any) -> list[MicroBatch]:
    """Micro-batches of these sizes, each with an image of padding, which has no weight."""
    found, at = [], 0
    for size in sizes:
        rows = [*range(at, at + size), 0]
        weight = tf.constant([1.0] * size + [0.0])
        found.append(MicroBatch(tf.constant(images[rows]), tf.constant(labels[rows]), weight, tf.constant(rows)))
        at += size
    return found


class _Squares(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(keras.ops.square(x), axis=1))  # of each example
        self.add_loss(keras.ops.full((5,), 0.1))  # of none, as a regularizer's
        return x


@pytest.mark.parametrize("sizes", [(7,), (4, 3), (2, 0, 5)])
def test_shares_add_up_to_the_global_batch(sizes: tuple[int, ...]) -> None:
    """Loss, penalties and gradients, however the batch is divided, as Keras has them; flags and rate are passed on."""
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.3)), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((2, 2, 1)), keras.layers.Flatten(), _Squares(), *layers])
    draw = np.random.default_rng(1)
    images, labels = draw.normal(size=(7, 2, 2, 1)).astype(np.float32), draw.integers(0, 3, 7).astype(np.int32)
    decayed = [model.trainable_variables[2]]
    spec = StepSpec((2, 2, 1), weight_decay=0.1, label_smoothing=0.2, micro_batches=len(sizes), flags=2)
    entropy_of = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2)
    with tf.GradientTape() as tape:
        entropy = entropy_of(tf.one_hot(labels, 3), model(images))
        penalty = tf.add_n(list(map(tf.reduce_sum, model.losses))) + 0.1 * tf.nn.l2_loss(decayed[0].value)
        loss = entropy + penalty
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    before, optimizer = [v.numpy() for v in model.trainable_variables], _Descent(1.0)
    step = make_train_step(Net(model, decayed), optimizer, spec)
    found = step(_batches(sizes, images, labels), tf.constant(7), 0.25, tf.constant([3.0, 4.0]))
    np.testing.assert_allclose(found, [loss, penalty, 3.0, 4.0], rtol=1e-5)
    for variable, value, gradient in zip(model.trainable_variables, before, expected, strict=True):
        np.testing.assert_allclose(value - variable.numpy(), gradient, rtol=1e-3, atol=1e-5)
    assert float(optimizer.learning_rate.numpy()) == 0.25


@pytest.mark.parametrize("shards", [None, 3])
def test_moving_statistics_follow_micro_batches_in_turn_and_are_the_mean_over_virtual_shards(
    shards: int | None,
) -> None:
    """The second micro-batch has no example, and changes nothing."""
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((1, 1, 2)), norm, keras.layers.Flatten(), keras.layers.Dense(2)])
    norm.moving_mean.assign([8.0, -8.0])
    images = np.random.default_rng(2).normal(size=(6, 1, 1, 2)).astype(np.float32)
    spec = StepSpec((1, 1, 2), micro_batches=3, virtual_shards=shards)
    batches = _batches((2, 0, 4), images, np.zeros(6, np.int32))
    batches = [MicroBatch(*(part[:-1] if len(b.weight) > 1 else part for part in b)) for b in batches]  # no padding
    make_train_step(Net(model, []), _Recorder(), spec)(batches, tf.constant(6), 0.1, tf.zeros(0))
    first, last = (part.mean((0, 1, 2)) for part in (images[:2], images[2:]))
    start = np.array([8.0, -8.0])
    in_turn = ((start + first) / 2 + last) / 2
    mean = ((start + first) / 2 + start + (start + last) / 2) / 3
    np.testing.assert_allclose(norm.moving_mean.numpy(), mean if shards else in_turn, rtol=1e-5)


def test_observers_see_gradients_their_sums_and_the_update_in_turn() -> None:
    observer = mock.Mock(spec=StepObserver)
    model = keras.Sequential([keras.Input((1, 1, 1)), keras.layers.Flatten(), keras.layers.Dense(2)])
    step = make_train_step(Net(model, []), _Recorder(), StepSpec((1, 1, 1)), [observer])
    step(_batches((2,), np.ones((2, 1, 1, 1), np.float32), np.zeros(2, np.int32)), tf.constant(2), 0.1, tf.zeros(0))
    seen = [(name, *map(len, given)) for name, given, _ in observer.method_calls]
    assert seen == [("on_gradients", 2), ("on_reduced", 2), ("on_sums", 1), ("after_update",)]


def test_images_are_shrunk_to_the_side_of_the_step() -> None:
    seen: list[Any] = []

    def look(x: Any) -> Any:
        seen.append(x.shape)
        return x

    layers = [keras.layers.Lambda(look), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((None, None, 1)), *layers])
    batches = _batches((3,), np.ones((3, 8, 8, 1), np.float32), np.zeros(3, np.int32))
    for side in (4, 8):
        step = make_train_step(Net(model, []), _Recorder(), StepSpec((8, 8, 1), side=side))
        step(batches, tf.constant(3), 0.1, tf.zeros(0))
        assert tuple(seen[-1])[1:] == (side, side, 1)
