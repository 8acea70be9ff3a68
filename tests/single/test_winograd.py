"""Convolutions in fewer multiplications: TensorFlow's own, to rounding, and only where they are quicker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.models import winograd
from hvd_cifar.models.winograd import WinogradConv2D, of_tile


def _plain(x: Any, kernel: Any) -> Any:
    return tf.nn.conv2d(x, kernel, 1, "SAME")


def _both_ways(
    conv: Callable[[Any, Any], Any], height: int, width: int, channels: int, filters: int, dtype: str = "float64"
) -> list[Any]:
    """Outputs and gradients of images and kernel, all of numbers that float32 holds, outputs and gradients near 1."""
    draw = np.random.default_rng(11)
    shapes = (4, height, width, channels), (3, 3, channels, filters), (4, height, width, filters)
    values = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    values[1] /= np.float32(np.sqrt(9 * channels))
    x, kernel, upstream = (tf.constant(value, dtype) for value in values)
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        y = tf.function(conv, autograph=False)(x, kernel)
    return [tf.cast(found, tf.float64) for found in (y, *tape.gradient(y, [x, kernel], upstream))]


@pytest.mark.parametrize("height, width", [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (7, 7), (9, 12), (1, 6), (15, 2)])
def test_it_is_the_convolution_with_its_gradients(height: int, width: int) -> None:
    found = _both_ways(winograd.convolve, height, width, 7, 5)
    for one, other in zip(found, _both_ways(_plain, height, width, 7, 5), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_float32_is_rounded_a_little_more_than_in_a_plain_sum() -> None:
    exact = _both_ways(_plain, 7, 7, 256, 256)

    def errors(conv: Callable[[Any, Any], Any]) -> list[float]:
        found = _both_ways(conv, 7, 7, 256, 256, "float32")
        return [float(np.std(np.subtract(one, other))) for one, other in zip(found, exact, strict=True)]

    for quick, plain in zip(errors(winograd.convolve), errors(_plain), strict=True):
        assert quick < 8 * plain


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_tile_s_transforms_multiply_as_often_as_it_sees_pixels(size: int) -> None:
    tile = of_tile(size)
    assert [part.shape for part in tile] == [(size + 2, size + 2), (size + 2, 3), (size, size + 2)]
    draw = np.random.default_rng(1)
    inputs, weights = draw.normal(size=size + 2), draw.normal(size=3)
    found = tile.outputs @ ((tile.kernel @ weights) * (tile.inputs @ inputs))
    np.testing.assert_allclose(found, np.correlate(inputs, weights), atol=1e-13)


@pytest.mark.parametrize(
    ("side", "channels", "filters", "dtype", "quick"),
    [
        (7, 256, 256, "float32", True),
        (12, 64, 256, "float64", True),
        (7, 64, 64, "float32", False),  # few channels
        (15, 64, 256, "float32", False),  # many pixels
        (7, 256, 256, "bfloat16", False),  # few bits
        (None, 256, 256, "float32", False),  # of any size: a model that is being built
    ],
)
def test_the_layer_takes_it_where_it_is_quicker(
    side: int | None, channels: int, filters: int, dtype: str, quick: bool
) -> None:
    layer = WinogradConv2D(filters, dtype=dtype)
    shape = (None, side, side, channels)
    layer.build(shape)
    traced = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype))
    kinds = {op.type for op in traced.graph.get_operations()}
    assert ("Conv2D" not in kinds) == quick
    assert traced.structured_outputs.shape[1:] == (side, side, filters)
