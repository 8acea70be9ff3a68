"""Keras's convolution, by the quickest way to the same values."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.kernels import compiled, side_by_side, winograd


class QuickConv2D(keras.layers.Conv2D):
    """Keras's convolution, by another way where that is quicker.

    That is on a CPU, of stride 1 and padded with zeros, for 3 x 3 or 5 x 5 pixels of a kernel: in fewer multiplications
    by what set-up compiled (`compiled`), or by products of matrices where images are small and weights many
    (`winograd`, float32 and float64); in bfloat16, where the former are not quicker, with the kernel's gradient over
    images side by side (`side_by_side`).
    """

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h, w, filters]."""
        way = self._quicker(images)
        if way is None:
            return super().call(images)
        outputs = way(images, tf.convert_to_tensor(self.kernel))
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return self.activation(outputs)

    def _quicker(self, images: Any) -> Any:
        _, height, width, _ = images.shape
        plain = self.strides == self.dilation_rate == (1, 1) and self.groups == 1
        same = self.padding == "same" and self.data_format == "channels_last"
        if not (plain and same and self.kernel_size in ((3, 3), (5, 5)) and height and width):
            return None
        if tf.config.list_logical_devices("GPU"):
            return None
        if compiled.is_quicker(height, width, self.kernel.shape, self.compute_dtype):
            return compiled.convolve
        if self.compute_dtype == "bfloat16":
            return side_by_side.convolve if width <= side_by_side.MOST_PIXELS else None
        few = max(height, width) <= winograd.MOST_PIXELS
        many = math.prod(self.kernel.shape) >= winograd.LEAST_WEIGHTS
        return winograd.convolve if few and many and self.compute_dtype in ("float32", "float64") else None
