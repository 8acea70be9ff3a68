"""Muon against its formulas in NumPy."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.optim.muon import COEFFICIENTS, Muon, orthogonal


def _by_hand(matrix: np.ndarray[Any, Any], steps: int) -> np.ndarray[Any, Any]:
    a, b, c = COEFFICIENTS
    x = matrix / np.linalg.norm(matrix)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("shape", [(3, 3, 4, 16), (3, 3, 1, 16), (2, 2, 3, 24)])  # the middle one is tall, not wide
def test_an_orthogonal_kernel_is_newton_and_schulz_s(shape: tuple[int, ...]) -> None:
    kernel = np.random.default_rng(0).normal(size=shape)
    assert (orthogonal(tf.zeros(shape), 3).numpy() == 0).all()  # of a dead channel: not 0 / |0|
    got = orthogonal(tf.constant(kernel), 3).numpy().reshape(-1, shape[-1]).T
    assert np.allclose(got, _by_hand(kernel.reshape(-1, shape[-1]).T, 3), atol=1e-12)


@pytest.mark.parametrize("resets_norms", [True, False])
def test_steps_follow_the_formulas(resets_norms: bool) -> None:
    """A convolution, its offset, a dense layer that is named, its bias, and a dense layer with a rate of its own."""
    draw = np.random.default_rng(2)
    inputs = keras.Input((6, 6, 4), dtype="float64")
    x = keras.layers.Conv2D(8, 3, name="conv", dtype="float64")(inputs)
    x = keras.layers.Dense(200, name="named", dtype="float64")(keras.layers.Flatten(dtype="float64")(x))
    x = keras.layers.Dense(10, use_bias=False, name="logits", dtype="float64")(x)
    variables = keras.Model(inputs, x).trainable_variables
    others = {"logits": (30.0, 0.01), "": (5.0, 0.0)}
    muon = Muon(0.1, 0.6, 0.8, others, steps=3, dense=["named"], resets_norms=resets_norms)
    muon.build(variables)
    expected = [v.numpy() for v in variables]
    velocities = [np.zeros_like(v) for v in expected]
    for rate in (0.1, 0.05):
        muon.learning_rate.assign(rate)
        gradients = [draw.normal(size=v.shape) for v in expected]
        muon.apply([tf.constant(g) for g in gradients], variables)
        for i, (variable, gradient) in enumerate(zip(variables, gradients, strict=True)):
            is_matrix = variable.path in ("conv/kernel", "named/kernel")
            momentum = 0.6 if is_matrix else 0.8
            if variable.path == "logits/kernel":
                gradient = gradient + 0.01 * expected[i]
            velocities[i] = momentum * velocities[i] + gradient
            update = gradient + momentum * velocities[i]
            if is_matrix:
                matrix = update.reshape(-1, gradient.shape[-1]).T
                turned = _by_hand(matrix, 3) if matrix.shape[0] <= matrix.shape[1] else _by_hand(matrix.T, 3).T
                update = turned.T.reshape(gradient.shape)
                if resets_norms:
                    expected[i] = expected[i] * np.sqrt(gradient.shape[-1]) / np.linalg.norm(expected[i])
                else:
                    update *= 0.2 * np.sqrt(max(matrix.shape))
            else:
                update *= 30.0 if variable.path == "logits/kernel" else 5.0
            expected[i] = expected[i] - rate * update
    for variable, value in zip(variables, expected, strict=True):
        # Keras keeps the learning rate in float32.
        assert np.allclose(variable.numpy(), value, rtol=1e-6, atol=1e-6), variable.path


def test_it_is_saved_and_made_again_from_its_configuration() -> None:
    options: dict[str, Any] = {"momentum": 0.5, "others": {"": (2.0, 0.1)}, "steps": 4, "dense": ("a",)}
    made = Muon.from_config(Muon(0.3, resets_norms=False, **options).get_config())
    assert {name: getattr(made, name) for name in options} == options and not made.resets_norms


def test_a_kernel_of_zeros_and_a_scale_of_rank_4() -> None:
    """Only kernels are orthogonalised. A kernel that begins at zero, as in a residual branch, learns."""
    conv = keras.layers.Conv2D(3, 1, use_bias=False, kernel_initializer="zeros")
    conv.build((None, 4, 4, 2))
    scale = keras.Variable(np.full((1, 1, 1, 3), 1e-6), name="scale")
    optimizer = Muon(0.5, momentum_of_others=0.0)
    optimizer.build([conv.kernel, scale])
    gradient = np.random.default_rng(0).normal(size=(1, 1, 2, 3))
    optimizer.apply(
        [tf.constant(gradient, tf.float32), tf.constant(np.ones((1, 1, 1, 3)), tf.float32)], [conv.kernel, scale]
    )
    expected = -0.5 * _by_hand(gradient.reshape(2, 3), 3)
    assert np.allclose(conv.kernel.numpy().reshape(2, 3), expected, atol=1e-5)
    assert np.allclose(scale.numpy(), 1e-6 - 0.5)
