"""Activations: their values, their gradients, their rounding; ReLU of a sum and for several consumers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.models import layers
from hvd_cifar.models.layers import QuickGelu, QuickRelu


@pytest.mark.parametrize(("dtype", "bits"), [("float64", 53), ("float32", 20), ("bfloat16", 8), ("float16", 11)])
def test_quick_gelu_is_rounded_once_and_has_second_derivatives(dtype: str, bits: int) -> None:
    """A penalty on gradients needs these: with zeros it would train nothing, without an error."""
    x = tf.cast(np.random.default_rng(8).normal(scale=3.0, size=1000), dtype)
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = QuickGelu(dtype=dtype)(x)
        first = inner.gradient(y, x)
    second = tf.cast(outer.gradient(first, x), tf.float64).numpy()
    exact = tf.cast(x, tf.float64).numpy()
    s = 1 / (1 + np.exp(-1.702 * exact))
    for found, wanted in ((y, exact * s), (first, s * (1 + 1.702 * exact * (1 - s)))):
        # Half a unit in the last place, and the rounding of 1 + tanh on the way.
        unit = np.maximum(np.abs(wanted), 1e-4) * 2.0 ** (1 - bits)
        on_the_way = 1e-14 if dtype == "float64" else 3e-6
        assert (np.abs(tf.cast(found, tf.float64).numpy() - wanted) <= 0.5 * unit + on_the_way).all()
    assert np.allclose(second, 1.702 * s * (1 - s) * (2 + 1.702 * exact * (1 - 2 * s)), atol=0.02)


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("terms", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_relu_of_a_sum_for_several_consumers(dtype: str, terms: int, copies: int) -> None:
    draw = np.random.default_rng(9)
    given = [tf.cast(draw.normal(size=(4, 3, 3, 5)), dtype) for _ in range(terms)]
    upstream = [tf.cast(draw.normal(size=(4, 3, 3, 5)), dtype) for _ in range(copies)]
    layer = QuickRelu(copies, dtype=dtype)

    def both(given: list[Any]) -> tuple[Any, Any]:
        with tf.GradientTape() as tape:
            tape.watch(given)
            made = layer(given if terms > 1 else given[0])
            made = list(made) if copies > 1 else [made]
        return made, tape.gradient(made, given, upstream)

    x, weight = (np.sum([tf.cast(v, tf.float64).numpy() for v in values], axis=0) for values in (given, upstream))
    value, slope = np.maximum(x, 0), (x > 0).astype(float)
    most = {"float64": 1e-13, "float32": 1e-5, "float16": 8e-3, "bfloat16": 6e-2}[dtype]
    for made, gradients in (both(given), tf.function(both, autograph=False)(given)):
        assert [len(made), len(gradients)] == [copies, terms]
        for found in made:
            assert found.dtype.name == dtype
            np.testing.assert_allclose(tf.cast(found, tf.float64), value, rtol=0, atol=most)
        for found in gradients:
            assert found.dtype.name == dtype
            np.testing.assert_allclose(tf.cast(found, tf.float64), weight * slope, rtol=0, atol=most)


def test_half_types_are_rounded_to_the_nearest_and_ties_to_even() -> None:
    draw = np.random.default_rng(4)
    values = draw.integers(0, 2**32, size=100_000, dtype=np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    ties = (draw.integers(0, 2**16, size=5_000, dtype=np.uint32) * 2**16 + 2**15).astype(np.uint32).view(np.float32)
    values = np.concatenate([values, ties[~np.isnan(ties)], [np.inf, -np.inf, 0.0, -0.0, 3.4e38]]).astype(np.float32)
    narrow = tf.function(lambda x: layers.narrow(x, tf.bfloat16), jit_compile=True, autograph=False)
    found, wanted = narrow(values), tf.cast(values, tf.bfloat16)
    assert (tf.bitcast(found, tf.uint16).numpy() == tf.bitcast(wanted, tf.uint16).numpy()).all()
    assert np.isnan(narrow(np.array([np.nan, -np.nan], np.float32)).numpy().astype(np.float32)).all()
