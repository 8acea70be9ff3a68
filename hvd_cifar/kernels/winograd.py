"""Convolutions in fewer multiplications (Winograd 1980; Lavin and Gray 2015), as products of matrices.

m outputs of a filter of r weights take m r multiplications as they stand, and m + r - 1 where the m + r - 1 inputs and
the filter go through fixed transforms first, and the products through a third: y = A ((G g) * (B d)). In two dimensions
an image falls into tiles of m x m outputs; a point of a tile is then one product of two matrices, images x channels
with channels x filters. Per output and channel that is ((m + r - 1) / m)^2 in place of r^2: for m = 4, 2.25 in place of
9 (r = 3) and 4 in place of 25 (r = 5).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

LARGEST_TILE = 4  # outputs; the rounding errors grow with it
# Where polynomials are evaluated that stand for filter and inputs: a set of small errors (Barabasz et al. 2018). On 7 x
# 7 pixels and 256 channels those of outputs are 2.7 times oneDNN's, where 0, 1, -1, 2, -2 would have 3.6.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0, 2.0, -0.5)
# Where it is quicker than oneDNN on a CPU: what moves through memory counts for more the larger the image, and for less
# the more weights each value meets.
MOST_PIXELS = 16  # in height and in width
LEAST_WEIGHTS = 100_000
PARTS = 8  # of a batch, one after the other, for what lies between the transforms to stay in a core's cache


class Transforms(NamedTuple):
    """Of one line of an image or of a tile, float64. `tiles` of them share each point, and lie side by side in it.

    Attributes:
        inputs: B [points * tiles, side].
        kernel: G [points, taps].
        outputs: A [side, points * tiles].
    """

    inputs: NDArray[np.float64]
    kernel: NDArray[np.float64]
    outputs: NDArray[np.float64]

    @property
    def points(self) -> int:
        """Transformed weights."""
        return len(self.kernel)

    @property
    def tiles(self) -> int:
        """Those that share their transformed weights: all where all are of a size, else each has its own."""
        return len(self.inputs) // len(self.kernel)


def convolve(images: Any, kernel: Any) -> Any:
    """Convolution of stride 1, padded with zeros, as `tf.nn.conv2d` has it but for rounding.

    Args:
        images: float [b, h, w, c]; h and w are known while the graph is made.
        kernel: of the same type, [r, r, c, f] with r = 3 or r = 5, for which there are points.

    Returns:
        [b, h, w, f].
    """
    _, height, width, channels = images.shape
    taps, _, _, filters = kernel.shape
    rows, columns = transforms(height, taps), transforms(width, taps)
    both = tf.constant(np.kron(rows.kernel, columns.kernel), images.dtype)
    weights = tf.reshape(tf.matmul(both, tf.reshape(kernel, [taps**2, -1])), [-1, channels, filters])
    if rows.tiles * columns.tiles == 1:  # the weights are larger than what lies between the transforms
        return _convolve(images, weights, rows, columns)
    bounds = tf.shape(images)[0] * np.arange(PARTS + 1) // PARTS
    parts = tf.split(images, bounds[1:] - bounds[:-1], num=PARTS)
    return tf.concat([_convolve(part, weights, rows, columns) for part in parts], axis=0)


def _convolve(images: Any, weights: Any, rows: Transforms, columns: Transforms) -> Any:
    """[b, h, w, c] with transformed weights [points of rows * points of columns, c, f] -> [b, h, w, f]."""
    _, height, width, channels = images.shape

    def constant(matrix: NDArray[np.floating[Any]]) -> Any:
        return tf.constant(matrix, images.dtype)

    # Pixels come first, so that a transform is one product of matrices with all images and channels side by side.
    seen = tf.matmul(constant(rows.inputs), tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [height, -1]))
    seen = _swapped(seen, rows.points, rows.tiles, width)
    seen = tf.matmul(constant(columns.inputs), tf.reshape(seen, [rows.points, width, -1]))
    products = tf.matmul(tf.reshape(seen, [rows.points * columns.points, -1, channels]), weights)
    outputs = tf.reshape(products, [rows.points, columns.points * columns.tiles, -1])
    outputs = _swapped(tf.matmul(constant(columns.outputs), outputs), rows.points, width, rows.tiles)
    outputs = tf.matmul(constant(rows.outputs), tf.reshape(outputs, [rows.points * rows.tiles, -1]))
    return tf.transpose(tf.reshape(outputs, [height, width, -1, weights.shape[2]]), [2, 0, 1, 3])


def _swapped(values: Any, first: int, second: int, third: int) -> Any:
    """As [first, third, second, ...], in the order of these."""
    return tf.transpose(tf.reshape(values, [first, second, third, -1]), [0, 2, 1, 3])


@functools.cache
def transforms(side: int, taps: int) -> Transforms:
    """The transforms of a line of `side` pixels: those of its tiles, each at its place, without what meets padding."""
    sizes = [len(part) for part in np.array_split(np.arange(side), -(-side // LARGEST_TILE))]
    tiles = [of_tile(size, taps) for size in sizes]
    inputs, outputs = [], []
    first = 0
    for tile, size in zip(tiles, sizes, strict=True):
        places = len(tile.inputs)
        seen, made = np.zeros((places, side + taps - 1)), np.zeros((side, places))
        seen[:, first : first + places] = tile.inputs
        made[first : first + size] = tile.outputs
        inputs.append(seen[:, taps // 2 : taps // 2 + side])
        outputs.append(made)
        first += size
    if len(set(sizes)) == 1:
        return Transforms(
            np.stack(inputs, axis=1).reshape(-1, side), tiles[0].kernel, np.stack(outputs, axis=2).reshape(side, -1)
        )
    return Transforms(
        np.concatenate(inputs), np.concatenate([tile.kernel for tile in tiles]), np.concatenate(outputs, axis=1)
    )


@functools.cache
def of_tile(size: int, taps: int) -> Transforms:
    """Those of `size` outputs, which see `size + taps - 1` inputs: the Toom-Cook algorithm, transposed.

    Its last point is infinity. All numbers are fractions of powers of two, and of 3, 5 and their powers in `kernel`
    alone.
    """
    points = POINTS[: size + taps - 2]
    places = len(points) + 1
    made = Transforms(np.zeros((places, places)), np.zeros((places, taps)), np.zeros((size, places)))
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        made.inputs[i, :-1] = np.poly(others)[::-1]
        made.kernel[i] = point ** np.arange(taps) / np.prod(np.subtract(point, others))
        made.outputs[:, i] = point ** np.arange(size)
    made.inputs[-1] = np.poly(points)[::-1]
    made.kernel[-1, -1] = made.outputs[-1, -1] = 1.0
    scale = 2.0 ** np.round(np.log2(np.abs(made.inputs).max(axis=1, keepdims=True)))
    return Transforms(made.inputs / scale, made.kernel * scale, made.outputs)
