"""Max pooling whose gradient does not depend on rounding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.models.layer import OwnLayer


@keras.saving.register_keras_serializable("hvd_cifar")
class SteadyMaxPooling2D(OwnLayer):
    """Max pooling over disjoint windows, in which the first of nearly equal pixels wins, whatever their rounding.

    Rounding decides which of nearly equal pixels is the largest, and so where the gradient goes. Rounding depends on
    the batch, and so on the number of ranks. Within 12 steps of float64, 2 ranks of `fast` differ from one rank by
    9e-10 of a loss with Keras's pooling, and by 1e-14 with this layer. The pixels of a window, in reading order, are
    lowered by 0, 1, 2, ... times `TIE` before they are compared. The maximum is that of the lowered values.

    Half types are too coarse for `TIE`, so they take TensorFlow's pooling, as do images of unknown size. On a CPU XLA
    compiles one pass forward and one backward, about as fast as TensorFlow's kernel.

    Args:
        size: the window's side in pixels; None: the whole image. Incomplete windows at the image's end are dropped.

    Raises:
        ValueError: where the size is not positive, or larger than the image.
    """

    SETTINGS = ("size",)

    def __init__(self, size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if size is not None and size < 1:
            raise ValueError(f"a window is 1 pixel wide or wider, not {size}")
        self.size = size

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / size, w / size, c], rounded down; [b, c] for the whole image."""
        sides = images.shape[1:3]
        self._check(sides)
        window = [self.size or side for side in sides]
        steady = images.dtype in TIE and None not in sides
        if steady and not tf.config.list_logical_devices("GPU") and math.prod(window) <= MOST_PLACES:
            pooled = _steady_maximum(images, *window)
        elif self.size is None:
            return tf.reduce_max(_all_lowered(images, *window) if steady else images, axis=[1, 2])
        else:
            pooled = tf.nn.max_pool2d(_all_lowered(images, *window) if steady else images, window, window, "VALID")
        return pooled if self.size else pooled[:, 0, 0]

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[b, h / size, w / size, c], or [b, c]."""
        batch, height, width, channels = input_shape
        if self.size is None:
            return (batch, channels)
        self._check((height, width))
        return (batch, *[side and side // self.size for side in (height, width)], channels)

    def _check(self, sides: Sequence[int | None]) -> None:
        if any(side is not None and side < (self.size or 1) for side in sides):
            raise ValueError(f"an image of {sides[0]} x {sides[1]} pixels has no window of {self.size} x {self.size}")

    def portable(self, images: Any) -> Any:
        """The same by `keras.ops`; see `models.portable`."""
        sides = images.shape[1:3]
        window = [self.size or side for side in sides]
        if self.compute_dtype == "float32":
            images = images - (TIE[tf.float32] * _lowering(*sides, *window)).astype(np.float32)
        return keras.ops.max_pool(images, window) if self.size else keras.ops.max(images, axis=(1, 2))


# Larger than a convolution's rounding error of values up to 10, smaller than a meaningful difference.
TIE = {tf.float32: 1e-5, tf.float64: 1e-12}
# The most pixels of a window that XLA compares one by one: the time to compile grows much faster than their number.
MOST_PLACES = 16


def _steady_maximum(images: Any, height: int, width: int) -> Any:
    @tf.custom_gradient
    def pool(x: Any) -> Any:
        pooled = _steady_maximum_forward(x, height, width)
        return pooled, lambda gradient: _steady_maximum_backward(x, pooled, gradient, height, width)

    return pool(images)


@tf.function(jit_compile=True, autograph=False)
def _steady_maximum_forward(x: Any, height: int, width: int) -> Any:
    # Not tf.maximum: XLA's drops a NaN in its second argument, and the check of the loss would miss it.
    return functools.reduce(lambda a, b: tf.where((a >= b) | (a != a), a, b), _lowered(x, height, width))


@tf.function(jit_compile=True, autograph=False)
def _steady_maximum_backward(x: Any, pooled: Any, gradient: Any, height: int, width: int) -> Any:
    lowered = _lowered(x, height, width)
    last = len(lowered) - 1
    chosen = tf.fill(tf.shape(pooled), last)
    for place in range(last - 1, -1, -1):
        chosen = tf.where(lowered[place] == pooled, place, chosen)
    parts = [tf.where(chosen == place, gradient, tf.zeros([], x.dtype)) for place in range(last + 1)]
    rows = [tf.stack(parts[first : first + width], axis=3) for first in range(0, last + 1, width)]
    _, whole_height, whole_width, channels = x.shape
    used = (whole_height // height * height, whole_width // width * width)
    spread = tf.reshape(tf.stack(rows, axis=2), [-1, *used, channels])
    return tf.pad(spread, [[0, 0], [0, whole_height - used[0]], [0, whole_width - used[1]], [0, 0]])


def _lowered(x: Any, height: int, width: int) -> list[Any]:
    """The lowered first pixels of all windows, the second ones, ...: [b, h / height, w / width, c] each."""
    bottom, right = (x.shape[1] // height * height, x.shape[2] // width * width)
    pixels = [x[:, i:bottom:height, j:right:width] for i in range(height) for j in range(width)]
    return [pixel - tf.constant(place * TIE[x.dtype], x.dtype) for place, pixel in enumerate(pixels)]


def _all_lowered(x: Any, height: int, width: int) -> Any:
    """All lowered pixels in their places: [b, h, w, c]."""
    _, rows, columns, _ = x.shape
    return x - tf.constant(_lowering(rows, columns, height, width) * TIE[x.dtype], x.dtype)


def _lowering(rows: int, columns: int, height: int, width: int) -> NDArray[np.int64]:
    """Each pixel's place in its window, in reading order: [rows, columns, 1]."""
    return (np.arange(rows)[:, None] % height * width + np.arange(columns) % width)[..., None]
