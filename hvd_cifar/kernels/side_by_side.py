"""Gradients of bfloat16 kernels, over several images side by side.

oneDNN sums the gradient of a kernel along an image's rows. A processor with AMX sums 32 bfloat16 numbers at a time, so
rows of 7 pixels leave it idle for three quarters of the time. Several images in a row, with zeros between them as
padding, fill the 32 columns.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

COLUMNS = 32  # that a tile sums at a time
MOST_PIXELS = 12  # in a row; longer rows lose more to the copies than they gain


def convolve(images: Any, kernel: Any) -> Any:
    """`tf.nn.conv2d` of stride 1 with zero padding, whose kernel's gradient is summed over images side by side.

    [b, h, w, c] with [r, r, c, f] -> [b, h, w, f]; h and w are static, r is odd.
    """

    @tf.custom_gradient
    def convolution(x: Any, weights: Any) -> Any:
        def gradients(upstream: Any) -> tuple[Any, Any]:
            of_images = tf.raw_ops.Conv2DBackpropInput(
                input_sizes=tf.shape(x), filter=weights, out_backprop=upstream, strides=[1, 1, 1, 1], padding="SAME"
            )
            return of_images, kernel_gradient(x, upstream, weights.shape)

        return tf.nn.conv2d(x, weights, 1, "SAME"), gradients

    return convolution(images, kernel)


def kernel_gradient(images: Any, upstream: Any, shape: tuple[int, ...]) -> Any:
    """The gradient of a kernel of `shape` [r, r, c, f], for images [b, h, w, c] and gradients [b, h, w, f]."""
    # The gradient that comes from a global max pooling has no static image size.
    upstream = tf.ensure_shape(upstream, [None, *images.shape[1:3], shape[3]])
    gap = shape[1] // 2
    count = max(1, (COLUMNS + gap) // (images.shape[2] + gap))
    return tf.raw_ops.Conv2DBackpropFilter(
        input=in_rows(images, count, gap),
        filter_sizes=shape,
        out_backprop=in_rows(upstream, count, gap),
        strides=[1, 1, 1, 1],
        padding="SAME",
    )


def in_rows(images: Any, count: int, gap: int) -> Any:
    """[b, h, w, c] -> [b / count, h, count * w + (count - 1) * gap, c], rounded up; `gap` columns of zeros between."""
    batch = tf.shape(images)[0]
    rows = -(-batch // count)
    missing = rows * count - batch
    # The last row ends with images of zeros.
    whole = tf.cond(missing > 0, lambda: tf.pad(images, [[0, missing], [0, 0], [0, 0], [0, 0]]), lambda: images)
    between = tf.zeros([rows, images.shape[1], gap, images.shape[3]], images.dtype)
    parts = [part for image in tf.split(whole, count) for part in (image, between)]
    return tf.concat(parts[:-1], axis=2)
