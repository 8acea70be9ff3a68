"""Winograd convolutions as products of matrices: TensorFlow's own, to rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.kernels import winograd
from hvd_cifar.kernels.winograd import TILE, of_tile


def _plain(x: Any, kernel: Any) -> Any:
    return tf.nn.conv2d(x, kernel, 1, "SAME")


def _both_ways(
    conv: Callable[[Any, Any], Any],
    batch: int,
    size: tuple[int, int],
    taps: int,
    channels: int,
    filters: int,
    dtype: str = "float64",
) -> list[Any]:
    """Outputs and gradients of images and kernel, all of numbers that float32 holds, outputs and gradients near 1."""
    draw = np.random.default_rng(11)
    shapes = (batch, *size, channels), (taps, taps, channels, filters), (batch, *size, filters)
    values = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
    values[1] /= np.float32(np.sqrt(taps**2 * channels))
    x, kernel, upstream = (tf.constant(value, dtype) for value in values)
    with tf.GradientTape() as tape:
        tape.watch([x, kernel])
        y = tf.function(conv, autograph=False)(x, kernel)
    return [tf.cast(found, tf.float64) for found in (y, *tape.gradient(y, [x, kernel], upstream))]


@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("size", [(4, 4), (12, 12), (8, 4), (4, 16)])
def test_it_is_the_convolution_with_its_gradients(size: tuple[int, int], taps: int) -> None:
    found = _both_ways(winograd.convolve, 11, size, taps, 7, 5)  # 11 images: 8 parts that differ
    for one, other in zip(found, _both_ways(_plain, 11, size, taps, 7, 5), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-12), ("float32", 1e-3)])  # an image missing is 1 or more
@pytest.mark.parametrize("batch", [1, 3, 9])  # of 8 parts, so that most are empty, or one image longer
def test_fewer_images_than_parts_are_all_there(batch: int, dtype: str, tolerance: float) -> None:
    found = _both_ways(winograd.convolve, batch, (8, 8), 5, 4, 4, dtype)
    for one, other in zip(found, _both_ways(_plain, batch, (8, 8), 5, 4, 4), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=tolerance)


@pytest.mark.parametrize("batch, side, taps, channels, times", [(4, 8, 3, 256, 12), (16, 12, 5, 64, 24)])
def test_float32_is_rounded_a_little_more_than_in_a_plain_sum(
    batch: int, side: int, taps: int, channels: int, times: float
) -> None:
    shape = batch, (side, side), taps, channels, channels
    exact = _both_ways(_plain, *shape)

    def errors(conv: Callable[[Any, Any], Any]) -> list[float]:
        found = _both_ways(conv, *shape, "float32")
        return [float(np.std(np.subtract(one, other))) for one, other in zip(found, exact, strict=True)]

    for quick, plain in zip(errors(winograd.convolve), errors(_plain), strict=True):
        assert quick < times * plain


@pytest.mark.parametrize("taps", [3, 5])
def test_a_tile_s_transforms_multiply_as_often_as_it_sees_pixels(taps: int) -> None:
    tile = of_tile(taps)
    seen = TILE + taps - 1
    assert [part.shape for part in tile] == [(seen, seen), (seen, taps), (TILE, seen)]
    draw = np.random.default_rng(1)
    inputs, weights = draw.normal(size=seen), draw.normal(size=taps)
    found = tile.outputs @ ((tile.kernel @ weights) * (tile.inputs @ inputs))
    np.testing.assert_allclose(found, np.correlate(inputs, weights), atol=1e-13)
