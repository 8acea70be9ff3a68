"""Winograd convolutions as products of matrices (Winograd 1980; Lavin and Gray 2015).

m outputs of a filter of r weights take m r multiplications directly. They take m + r - 1 if inputs and filter are
transformed first, and the products after: y = A ((G g) * (B d)). In two dimensions an image is cut into tiles of m x m
outputs. Each point of the tiles is one product of two matrices, images x channels with channels x filters. An output
takes ((m + r - 1) / m)^2 products per channel instead of r^2: 4 instead of 25 for m = 4 and r = 5.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

TAPS = 5  # of a kernel's side
TILE = 4  # outputs of a tile's side; rounding errors grow with it
# Evaluation points with small rounding errors (Barabasz et al. 2018); infinity is the last one.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0, 2.0, -0.5)
# Within these limits it is faster than oneDNN on a CPU: memory traffic grows with the image, saved products with the
# weights.
MOST_PIXELS = 16  # in height and in width
LEAST_WEIGHTS = 100_000
PARTS = 8  # of a batch, computed one after the other, so that transformed values stay in a core's cache


class Transforms(NamedTuple):
    """Transform matrices: y = outputs ((kernel g) * (inputs d))."""

    inputs: NDArray[np.float64]  # B [points * tiles, side]
    kernel: NDArray[np.float64]  # G [points, TAPS]
    outputs: NDArray[np.float64]  # A [side, points * tiles]


def is_quicker(height: int, width: int, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `convolve` computes a kernel of `shape` [r, r, c, f] on such images, and is faster than TensorFlow."""
    if dtype not in ("float32", "float64") or tuple(shape[:2]) != (TAPS, TAPS) or math.prod(shape) < LEAST_WEIGHTS:
        return False
    return all(side % TILE == 0 and side <= MOST_PIXELS for side in (height, width))


def convolve(images: Any, kernel: Any) -> Any:
    """Convolution of stride 1 with zero padding: [b, h, w, c] with [r, r, c, f] -> [b, h, w, f], as `tf.nn.conv2d`.

    h and w are static multiples of `TILE`; r is 5.
    """
    _, height, width, channels = images.shape
    rows, columns = transforms(height), transforms(width)
    both = tf.constant(np.kron(rows.kernel, columns.kernel), images.dtype)
    weights = tf.reshape(tf.matmul(both, tf.reshape(kernel, [TAPS**2, -1])), [-1, channels, kernel.shape[3]])
    bounds = tf.shape(images)[0] * np.arange(PARTS + 1) // PARTS
    parts = tf.split(images, bounds[1:] - bounds[:-1], num=PARTS)
    return tf.concat([_convolve(part, weights, rows, columns) for part in parts], axis=0)


def _convolve(images: Any, weights: Any, rows: Transforms, columns: Transforms) -> Any:
    """[b, h, w, c] with transformed weights [points * points, c, f] -> [b, h, w, f]."""
    _, height, width, channels = images.shape
    points = len(rows.kernel)

    def constant(matrix: NDArray[np.floating[Any]]) -> Any:
        return tf.constant(matrix, images.dtype)

    # Pixels come first: a transform is then one product of matrices, with all images and channels side by side.
    seen = tf.matmul(constant(rows.inputs), tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [height, -1]))
    seen = _swapped(seen, points, height // TILE, width)
    seen = tf.matmul(constant(columns.inputs), tf.reshape(seen, [points, width, -1]))
    products = tf.matmul(tf.reshape(seen, [points * points, -1, channels]), weights)
    outputs = tf.reshape(products, [points, points * (width // TILE), -1])
    outputs = _swapped(tf.matmul(constant(columns.outputs), outputs), points, width, height // TILE)
    outputs = tf.matmul(constant(rows.outputs), tf.reshape(outputs, [points * (height // TILE), -1]))
    return tf.transpose(tf.reshape(outputs, [height, width, -1, weights.shape[2]]), [2, 0, 1, 3])


def _swapped(values: Any, first: int, second: int, third: int) -> Any:
    """[first, second, third, ...] as [first, third, second, ...]."""
    return tf.transpose(tf.reshape(values, [first, second, third, -1]), [0, 2, 1, 3])


@functools.cache
def transforms(side: int) -> Transforms:
    """Those of a line of `side` pixels: the Toom-Cook algorithm, transposed, at each tile's place."""
    places, tiles = len(POINTS) + 1, side // TILE
    reads, kernel, writes = np.zeros((places, places)), np.zeros((places, TAPS)), np.zeros((TILE, places))  # of a tile
    for i, point in enumerate(POINTS):
        others = [other for other in POINTS if other != point]
        reads[i, :-1] = np.poly(others)[::-1]
        kernel[i] = point ** np.arange(TAPS) / np.prod(np.subtract(point, others))
        writes[:, i] = point ** np.arange(TILE)
    reads[-1] = np.poly(POINTS)[::-1]
    kernel[-1, -1] = writes[-1, -1] = 1.0
    scale = 2.0 ** np.round(np.log2(np.abs(reads).max(axis=1, keepdims=True)))
    inputs, outputs = np.zeros((places, tiles, side + TAPS - 1)), np.zeros((side, places, tiles))
    for i in range(tiles):
        inputs[:, i, i * TILE : i * TILE + places] = reads / scale
        outputs[i * TILE : (i + 1) * TILE, :, i] = writes
    inputs = inputs[:, :, TAPS // 2 : TAPS // 2 + side]  # without the factors of padding
    return Transforms(inputs.reshape(-1, side), kernel * scale, outputs.reshape(side, -1))
