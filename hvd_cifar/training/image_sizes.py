"""Progressive resizing: the image size of each step, and how images are shrunk to it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray


@dataclass(frozen=True)
class ImageSizes:
    """Image sizes, each for an equal part of a run's steps.

    Attributes:
        sides: heights of images in pixels, one for each part; widths follow in proportion.
        total_steps: of all epochs, even where --max-steps ends the run earlier.
    """

    sides: tuple[int, ...]
    total_steps: int

    def __call__(self, step: int) -> int:
        """The size for the next step after `step` finished ones."""
        return self.sides[min(step * len(self.sides) // self.total_steps, len(self.sides) - 1)]

    def parts(self, first: int, end: int) -> list[tuple[int, range]]:
        """Each side with its steps in range(first, end); `end` is at most `total_steps`."""
        edges = [-(-part * self.total_steps // len(self.sides)) for part in range(len(self.sides) + 1)]
        spans = zip(self.sides, edges, edges[1:], strict=False)
        return [(side, range(max(first, begin), min(end, stop))) for side, begin, stop in spans]


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
