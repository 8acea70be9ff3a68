"""Layers that make images smaller: the maximum of windows, and the shortcut between stages."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf


class SteadyMaxPooling2D(keras.layers.Layer):
    """The maximum of windows side by side, whose gradient goes to the same pixel however values are rounded.

    Where pixels of a window are equal, which of them is the largest hangs on the last bit if a convolution rounds one
    pixel otherwise than the next (as Winograd's does). That bit changes with the number of images computed together,
    and so with the number of ranks. Where the pixels' surroundings are equal, too, nothing hangs on it; but a kernel
    that passes a pixel on as it is (`Dirac`'s, at first) makes equals of pixels whose surroundings are not, and the
    gradients of kernels are then others. So the pixels of a window, in reading order, are lowered by 0, 1, 2, ... times
    `TIE` before they are compared: the first of equals is the largest. The maximum is of the lowered values.

    In float32 and float64; half types, which have no bits for that, and images whose size is not known take the usual
    way. On a CPU it is compiled by XLA into one pass forward and one backward, about as fast as TensorFlow's kernel.

    Args:
        size: the window's side in pixels; what is left over at the right and below is dropped. None: the whole image.

    Raises:
        ValueError: where the size is not positive, or larger than the image.
    """

    def __init__(self, size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if size is not None and size < 1:
            raise ValueError(f"a window is 1 pixel wide or wider, not {size}")
        self.size = size

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / size, w / size, c], rounded down; [b, c] for the whole image."""
        sides = images.shape[1:3]
        window = [self.size or side for side in sides]
        if any(side is not None and side < of for side, of in zip(sides, window, strict=True)):
            raise ValueError(f"an image of {sides[0]} x {sides[1]} pixels has no window of {self.size} x {self.size}")
        steady = images.dtype in TIE and None not in sides
        if steady and not tf.config.list_logical_devices("GPU"):
            pooled = _steady_maximum(images, *window)
        elif self.size is None:
            return tf.reduce_max(_all_lowered(images, *window) if steady else images, axis=[1, 2])
        else:
            pooled = tf.nn.max_pool2d(_all_lowered(images, *window) if steady else images, window, window, "VALID")
        return pooled if self.size else pooled[:, 0, 0]

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        batch, height, width, channels = input_shape
        if self.size is None:
            return (batch, channels)
        return (batch, *[side and side // self.size for side in (height, width)], channels)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer."""
        return {**super().get_config(), "size": self.size}


# Above what a convolution rounds, in float32 of values up to some 10, and below what tells one value from another.
TIE = {tf.float32: 1e-5, tf.float64: 1e-12}


def _steady_maximum(images: Any, height: int, width: int) -> Any:
    @tf.custom_gradient
    def pool(x: Any) -> Any:
        pooled = _steady_maximum_forward(x, height, width)
        return pooled, lambda gradient: _steady_maximum_backward(x, pooled, gradient, height, width)

    return pool(images)


@tf.function(jit_compile=True, autograph=False)
def _steady_maximum_forward(x: Any, height: int, width: int) -> Any:
    # Not tf.maximum: XLA's drops a NaN that comes second, and the check of the loss would never see it.
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
    """Of every window the first pixel, the second, ...: [b, h / height, w / width, c] each."""
    bottom, right = (x.shape[1] // height * height, x.shape[2] // width * width)
    pixels = [x[:, i:bottom:height, j:right:width] for i in range(height) for j in range(width)]
    return [pixel - tf.constant(place * TIE[x.dtype], x.dtype) for place, pixel in enumerate(pixels)]


def _all_lowered(x: Any, height: int, width: int) -> Any:
    """The same, all of them in their places: [b, h, w, c]."""
    rows, columns = (np.arange(side) % of for side, of in zip(x.shape[1:3], (height, width), strict=True))
    return x - tf.constant((rows[:, None] * width + columns)[..., None] * TIE[x.dtype], x.dtype)


class PadShortcut(keras.layers.Layer):
    """The parameter-free shortcut between stages: every second pixel, new channels zero (He et al. 2015, option A)."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / 2, w / 2, filters], rounded up."""
        missing = self.filters - images.shape[-1]
        # Pooling over one pixel is the same as images[:, ::2, ::2], in a tenth of the time on a CPU, gradient and all.
        halved = tf.nn.avg_pool2d(images, ksize=1, strides=2, padding="VALID")
        return tf.pad(halved, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        batch, height, width, _ = input_shape
        halved = [None if side is None else (side + 1) // 2 for side in (height, width)]
        return (batch, halved[0], halved[1], self.filters)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer."""
        return {**super().get_config(), "filters": self.filters}
