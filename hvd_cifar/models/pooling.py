"""Max pooling whose gradient does not depend on rounding."""

from __future__ import annotations

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

    Half types are too coarse for `TIE`, so their pixels are not lowered, nor are those of images of unknown size.

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
        if images.dtype in TIE and None not in sides:
            images -= tf.constant(self._lowering(sides) * TIE[images.dtype], images.dtype)
        if self.size is None:
            return tf.reduce_max(images, axis=[1, 2])
        return tf.nn.max_pool2d(images, self.size, self.size, "VALID")

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

    def _lowering(self, sides: Sequence[int]) -> NDArray[np.int64]:
        """Each pixel's place in its window, in reading order: [h, w, 1]."""
        height, width = (self.size or side for side in sides)
        return (np.arange(sides[0])[:, None] % height * width + np.arange(sides[1]) % width)[..., None]

    def portable(self, images: Any) -> Any:
        """The same by `keras.ops`; see `models.portable`."""
        if self.compute_dtype == "float32":
            images = images - (TIE[tf.float32] * self._lowering(images.shape[1:3])).astype(np.float32)
        return keras.ops.max_pool(images, self.size) if self.size else keras.ops.max(images, axis=(1, 2))


# Larger than a convolution's rounding error of values up to 10, smaller than a meaningful difference.
TIE = {tf.float32: 1e-5, tf.float64: 1e-12}
