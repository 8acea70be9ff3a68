"""3 x 3 convolutions in fewer multiplications (Winograd 1980; Lavin and Gray 2015), as products of matrices.

m outputs of a filter of 3 weights take 3m multiplications as they stand, and m + 2 where the m + 2 inputs and the
filter go through fixed transforms first, and the m + 2 products through a third: y = A ((G g) * (B d)). In two
dimensions an image falls into tiles of m x m outputs; a place of a tile is then one product of two matrices, images x
channels with channels x filters. Per output and channel that is ((m + 2) / m)^2 in place of 9: 2.25 for m = 4.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

TAPS = 3  # of the filters, in each dimension
LARGEST_TILE = 4  # outputs; the rounding errors grow with it
# Where polynomials are evaluated that stand for filter and inputs: a set of small errors (Barabasz et al. 2018). On 7 x
# 7 pixels and 256 channels those of outputs are 2.7 times oneDNN's, where 0, 1, -1, 2, -2 would have 3.6.
POINTS = (0.0, 1.0, -1.0, 0.5, -2.0)
# Where it is quicker than oneDNN on a CPU: what moves through memory counts for more the larger the image, and for less
# the more channels each value meets.
MOST_PIXELS = 12  # in height and in width
LEAST_PAIRS = 64 * 256  # of an input channel with a filter


class WinogradConv2D(keras.layers.Conv2D):
    """A 3 x 3 convolution, padded with zeros, without offset; in fewer multiplications where that is quicker.

    That is on a CPU, in float32 and float64, for many channels on few pixels. Half types have no bits to spare for the
    transforms, and so go the usual way, as all types do on a GPU.
    """

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(filters, TAPS, padding="same", use_bias=False, **kwargs)

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h, w, filters]."""
        _, height, width, channels = images.shape
        few = height is not None and width is not None and max(height, width) <= MOST_PIXELS
        many = channels * self.filters >= LEAST_PAIRS
        exact = self.compute_dtype in ("float32", "float64")
        if few and many and exact and not tf.config.list_logical_devices("GPU"):
            return convolve(images, tf.convert_to_tensor(self.kernel))
        return super().call(images)


class Transforms(NamedTuple):
    """Of one line of an image, float64.

    Attributes:
        inputs: B [places, side].
        kernel: G [places, 3].
        outputs: A [side, places].
    """

    inputs: NDArray[np.float64]
    kernel: NDArray[np.float64]
    outputs: NDArray[np.float64]


def convolve(images: Any, kernel: Any) -> Any:
    """Convolution of stride 1, padded with zeros, as `tf.nn.conv2d` has it but for rounding.

    Args:
        images: float [b, h, w, c]; h and w are known while the graph is made.
        kernel: of the same type, [3, 3, c, f].

    Returns:
        [b, h, w, f].
    """
    _, height, width, channels = images.shape
    filters = kernel.shape[3]
    rows, columns = transforms(height), transforms(width)
    down, right = len(rows.inputs), len(columns.inputs)

    def constant(matrix: NDArray[np.floating[Any]]) -> Any:
        return tf.constant(matrix, images.dtype)

    # Pixels come first, so that a transform is one product of matrices with all images and channels side by side.
    pixels = tf.reshape(tf.transpose(images, [1, 2, 0, 3]), [height, -1])
    seen = tf.reshape(tf.matmul(constant(rows.inputs), pixels), [down, width, -1])
    seen = tf.reshape(tf.matmul(constant(columns.inputs), seen), [down * right, -1, channels])
    weights = tf.matmul(constant(np.kron(rows.kernel, columns.kernel)), tf.reshape(kernel, [TAPS**2, -1]))
    products = tf.matmul(seen, tf.reshape(weights, [down * right, channels, filters]))
    outputs = tf.matmul(constant(columns.outputs), tf.reshape(products, [down, right, -1]))
    outputs = tf.matmul(constant(rows.outputs), tf.reshape(outputs, [down, -1]))
    return tf.transpose(tf.reshape(outputs, [height, width, -1, filters]), [2, 0, 1, 3])


@functools.cache
def transforms(side: int) -> Transforms:
    """The transforms of a line of `side` pixels: those of its tiles, each at its place, without what meets padding."""
    count = -(-side // LARGEST_TILE)
    tiles = [len(part) for part in np.array_split(np.arange(side), count)]
    places = sum(tiles) + count * (TAPS - 1)
    whole = Transforms(np.zeros((places, side)), np.zeros((places, TAPS)), np.zeros((side, places)))
    pixel = place = 0
    for size in tiles:
        tile = of_tile(size)
        here = slice(place, place + len(tile.inputs))
        first, last = max(0, pixel - 1), min(side, pixel + size + 1)  # pixels that its outputs see
        whole.inputs[here, first:last] = tile.inputs[:, first - pixel + 1 : last - pixel + 1]
        whole.kernel[here] = tile.kernel
        whole.outputs[pixel : pixel + size, here] = tile.outputs
        pixel, place = pixel + size, here.stop
    return whole


@functools.cache
def of_tile(size: int) -> Transforms:
    """Those of `size` outputs, which see `size + 2` inputs: the Toom-Cook algorithm, transposed.

    Its last point is infinity. All numbers are fractions of powers of two and of 3 and 5 in `kernel` alone.
    """
    points = POINTS[: size + TAPS - 2]
    places = len(points) + 1
    made = Transforms(np.zeros((places, places)), np.zeros((places, TAPS)), np.zeros((size, places)))
    for i, point in enumerate(points):
        others = [other for other in points if other != point]
        made.inputs[i, :-1] = np.poly(others)[::-1]
        made.kernel[i] = point ** np.arange(TAPS) / np.prod(np.subtract(point, others))
        made.outputs[:, i] = point ** np.arange(size)
    made.inputs[-1] = np.poly(points)[::-1]
    made.kernel[-1, -1] = made.outputs[-1, -1] = 1.0
    scale = 2.0 ** np.round(np.log2(np.abs(made.inputs).max(axis=1, keepdims=True)))
    return Transforms(made.inputs / scale, made.kernel * scale, made.outputs)
