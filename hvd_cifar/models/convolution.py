"""Keras's convolution, with a faster CPU kernel where one applies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.kernels import compiled, side_by_side, winograd


@keras.saving.register_keras_serializable("hvd_cifar")
class QuickConv2D(keras.layers.Conv2D):
    """Keras's Conv2D, with a faster CPU kernel for 3 x 3 and 5 x 5 of stride 1 that keep the images' size.

    - `kernels.compiled`: 3 x 3 in float32, and both in bfloat16 where the processor sums its products.
    - `kernels.winograd`: 5 x 5 in float32 and float64, on small images.
    - `kernels.side_by_side`: the gradients of other bfloat16 kernels, on small images.
    """

    plain = False  # whether it is Keras's alone, so that every program can load the net

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h, w, filters]."""
        convolve = self._kernel_for(images)
        if convolve is None:
            return super().call(images)
        outputs = convolve(images, tf.convert_to_tensor(self.kernel))
        if self.use_bias:
            outputs = tf.nn.bias_add(outputs, tf.convert_to_tensor(self.bias))
        return self.activation(outputs)

    def _kernel_for(self, images: Any) -> Callable[[Any, Any], Any] | None:
        simple = self.strides == self.dilation_rate == (1, 1) and self.groups == 1
        same = self.padding == "same" and self.data_format == "channels_last"
        is_changed = type(self).convolution_op is not keras.layers.Conv2D.convolution_op  # by a subclass
        if self.plain or not (simple and same and self.kernel_size in ((3, 3), (5, 5))) or is_changed:
            return None
        if tf.config.list_logical_devices("GPU"):
            return None
        if compiled.is_quicker(self.kernel.shape, self.compute_dtype):
            return compiled.convolve
        _, height, width, _ = images.shape
        if height is None or width is None:
            return None
        if self.compute_dtype == "bfloat16":
            return side_by_side.convolve if width <= side_by_side.MOST_PIXELS else None
        quicker = winograd.is_quicker(height, width, self.kernel.shape, self.compute_dtype)
        return winograd.convolve if quicker else None
