"""The step on one rank without Horovod: the smallest images, and a NaN's way to the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import nets
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.training import step as step_module
from hvd_cifar.training.step import StepSpec, make_train_step


class _Recorder:
    """An optimizer that notes the gradients it is given."""

    def __init__(self) -> None:
        self.learning_rate = keras.Variable(0.0)
        self.gradients: list[Any] = []

    def scale_loss(self, loss: Any) -> Any:
        return loss

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        assert len(gradients) == len(variables)
        self.gradients = list(gradients)


@pytest.fixture(autouse=True)
def on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Horovod: nothing to sum up over."""

    def apply_and_sum(optimizer: Any, gradients: Any, variables: Any, values: Any) -> list[Any]:
        optimizer.apply(gradients, variables)
        return list(values)

    monkeypatch.setattr(step_module, "apply_and_sum", apply_and_sum)


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("side", [9, pytest.param(16, marks=pytest.mark.slow), 17])
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
    """The optimizer's share in a NaN's way: what a gradient has, its variable gets."""

    def apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            variable.assign_sub(0.001 * gradient)


@pytest.mark.parametrize("precision", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("name", ["tutorial", "resnet8", "fast"])
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
