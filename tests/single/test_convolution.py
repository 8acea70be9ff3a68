"""The layer for convolutions, and its two ways in TensorFlow: products of matrices, gradients over images side by side.

All of them are TensorFlow's convolution, up to rounding, and are taken only where they are quicker.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.kernels import compiled, side_by_side, winograd
from hvd_cifar.models.convolution import QuickConv2D
from tests.single.test_compiled import both_ways, draw, plain


@pytest.mark.parametrize("batch", [1, 3, 11])  # fewer images than parts or than a row has, and what divides neither
@pytest.mark.parametrize(
    ("convolve", "height", "width", "taps"),
    [
        *((winograd.convolve, *size, 5) for size in ((4, 4), (12, 12), (8, 4), (4, 16))),
        *((side_by_side.convolve, *size, 3) for size in ((3, 3), (7, 7), (5, 12), (1, 1), (32, 32))),
        (side_by_side.convolve, 12, 5, 5),
    ],
)
def test_values_and_gradients_are_the_convolution_s(
    convolve: Any, height: int, width: int, taps: int, batch: int
) -> None:
    """In float64, where no way rounds enough to hide a pixel that is missing."""
    given = draw((batch, height, width, 7, 5), "float64", taps)
    for one, other in zip(both_ways(convolve, *given), both_ways(plain, *given), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("side", "taps", "channels", "filters", "dtype", "way"),
    [
        (16, 3, 32, 32, "float32", "compiled"),
        (None, 3, 32, 32, "float32", "compiled"),  # of any size
        (16, 3, 8, 32, "float32", ""),
        (16, 3, 32, 32, "float64", ""),
        (12, 5, 64, 64, "float32", "winograd"),
        (12, 5, 64, 64, "float64", "winograd"),
        (8, 5, 32, 64, "float32", ""),  # few weights
        (20, 5, 64, 64, "float32", ""),  # many pixels
        (11, 5, 64, 64, "float32", ""),  # no whole number of tiles
        (None, 5, 256, 256, "float32", ""),
        (7, 3, 4, 8, "bfloat16", "side by side"),
        (12, 5, 4, 8, "bfloat16", "side by side"),
        (15, 3, 4, 8, "bfloat16", ""),  # long rows
    ],
)
def test_each_way_is_taken_where_it_is_quicker(
    side: int | None, taps: int, channels: int, filters: int, dtype: str, way: str
) -> None:
    layer = QuickConv2D(filters, taps, padding="same", dtype=dtype, bias_initializer="ones")
    shape = (None, side, side, channels)
    layer.build(shape)

    def step(images: Any) -> Any:
        with tf.GradientTape() as tape:
            made = layer(images)
        return made, tape.gradient(made, layer.kernel.value)

    traced = tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype))
    kinds = [op.type for op in traced.graph.get_operations()]
    found = {"compiled": "HvdCifarConvolution" in kinds, "side by side": "ConcatV2" in kinds and "Conv2D" in kinds}
    found["winograd"] = "BatchMatMulV2" in kinds
    if compiled.operations() is None and way == "compiled":
        way = ""
    assert [name for name, taken in found.items() if taken] == [way] * bool(way)
    assert traced.structured_outputs[0].shape[1:] == (side, side, filters)
    if side is not None:
        assert np.allclose(tf.cast(traced(tf.zeros((1, *shape[1:]), dtype))[0], "float32"), 1.0)


@pytest.mark.parametrize(
    "options", [{"activation": "relu"}, {"dilation_rate": 2}, {"strides": 2}, {"groups": 2}, {"padding": "valid"}]
)
def test_the_layer_is_keras_s_with_any_option(options: dict[str, Any]) -> None:
    images = tf.constant(np.random.default_rng(5).normal(size=(2, 7, 7, 256)), "float64")
    given: dict[str, Any] = {"dtype": "float64", "padding": "same", **options}
    ours, theirs = QuickConv2D(128, 3, **given), keras.layers.Conv2D(128, 3, **given)
    ours.build(images.shape), theirs.build(images.shape)
    theirs.set_weights(ours.get_weights())
    np.testing.assert_allclose(ours(images), theirs(images), rtol=0, atol=1e-12)
