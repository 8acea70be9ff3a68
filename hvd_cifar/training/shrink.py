"""How images are shrunk to the size of a step."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


def shrink(images: Any, height: int) -> Any:
    """Float [b, h, w, c] -> [b, height, w * height / h, c], like `tf.image.resize` with antialias, by two products.

    Each new pixel is a mean of old ones, weighted by a triangle two new pixels wide. `height` is at most h.
    """
    _, old_height, old_width, channels = images.shape
    width = scaled_width(height, old_height, old_width)
    rows = tf.constant(_triangles(old_height, height), images.dtype)
    columns = tf.constant(np.kron(_triangles(old_width, width), np.eye(channels)).T, images.dtype)
    shrunk = tf.matmul(rows, tf.reshape(images, [-1, old_height, old_width * channels]))
    shrunk = tf.matmul(tf.reshape(shrunk, [-1, old_width * channels]), columns)
    return tf.reshape(shrunk, [-1, height, width, channels])


def scaled_width(height: int, old_height: int, old_width: int) -> int:
    """The width of images that are shrunk to a height."""
    return max(1, round(old_width * height / old_height))


@cache
def _triangles(whole: int, side: int) -> NDArray[np.float64]:
    """Weights [side, whole] of the old pixels in each new one."""
    scale = whole / side
    centres = (np.arange(side)[:, None] + 0.5) * scale
    weights = np.maximum(0.0, 1.0 - np.abs(np.arange(whole)[None, :] + 0.5 - centres) / scale)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
