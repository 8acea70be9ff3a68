"""Random distortion of training images, and the plain view of test images.

What happens to an example is a pure function of (seed, epoch, example): the draws are hashed from these three, so
they depend neither on the batch nor on the rank that the example falls into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.data import order

# Mean and standard deviation of CIFAR-10's training pixels per channel (red, green, blue), on the scale 0 to 255.
CHANNEL_MEAN = (125.3, 123.0, 113.9)
CHANNEL_DEVIATION = (63.0, 62.1, 66.7)
SIDE = 32  # pixels
TUTORIAL_SIDE = 24  # pixels, the crop of TensorFlow's tutorial
PAD = 4  # pixels, on each side, as He et al. 2015 (section 4.2)

FAST_PAD = 2  # pixels, on each side, for `fast`

RANDOM_DRAWS = 5  # row offset, column offset, flip, brightness, contrast
DRAWS_PER_EXAMPLE = RANDOM_DRAWS + 1  # and the alternating flip

# images uint8 [b, 32, 32, 3], draws float32 [b, 5] in [0, 1) -> float32 [b, side, side, 3]
TrainView = Callable[[Any, Any], Any]
# images uint8 [b, 32, 32, 3] -> float32 [b, side, side, 3]
TestView = Callable[[Any], Any]


class Views(NamedTuple):
    """How one model sees images: its side in pixels, a random view for training, a plain one for tests."""

    side: int
    train: TrainView
    test: TestView


def draws(seed: int, epoch: int, examples: NDArray[np.int64]) -> NDArray[np.float32]:
    """What distorts each example in an epoch, float32 [len(examples), DRAWS_PER_EXAMPLE].

    Uniform numbers in [0, 1); and last the alternating flip, 0 or 1: random in epoch 0, and then the other one in every
    epoch, so that two epochs in a row show both sides of every image (Jordan 2024, section 3.6).
    """
    base = order.mix(examples.astype(np.uint64) ^ order.key(seed, 1, epoch))
    columns = np.arange(1, RANDOM_DRAWS + 1, dtype=np.uint64)
    bits = order.mix(base[:, None] ^ order.mix(columns)[None, :])
    uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)  # 24 bits fill a float32's mantissa
    first = order.mix(examples.astype(np.uint64) ^ order.key(seed, 2))
    flip = ((first + np.uint64(epoch)) & np.uint64(1)).astype(np.float32)
    return np.concatenate([uniform, flip[:, None]], axis=1)


def _crop_and_flip(images: Any, row: Any, column: Any, flip: Any, side: int) -> Any:
    """Cut [side, side] out of uint8 [b, h, w, 3] at (row, column), int32 [b], mirrored where flip, bool [b].

    By NumPy, which copies rows of pixels; a gather of single pixels makes the whole view take three times as long.
    """
    cut = tf.numpy_function(lambda i, r, c, f: crop_and_flip(i, r, c, f, side), [images, row, column, flip], tf.uint8)
    return tf.ensure_shape(cut, [None, side, side, 3])


def crop_and_flip(
    images: NDArray[np.uint8], row: NDArray[Any], column: NDArray[Any], flip: NDArray[Any], side: int
) -> NDArray[np.uint8]:
    """The same, of arrays."""
    cut = np.empty((len(images), side, side, 3), np.uint8)
    places = zip(row.tolist(), column.tolist(), flip.tolist(), strict=True)
    for image, target, (top, left, mirrored) in zip(images, cut, places, strict=True):
        part = image[top : top + side, left : left + side]
        target[:] = part[:, ::-1] if mirrored else part
    return cut


def _offsets(draw: Any, choices: int) -> Any:
    """Uniform numbers in [0, 1) -> int32 in 0 .. choices - 1."""
    return tf.cast(draw * float(choices), tf.int32)


def _standardise_each(images: Any) -> Any:
    """Zero mean and unit variance per image, as tf.image.per_image_standardization, for a whole batch."""
    mean, variance = tf.nn.moments(images, axes=[1, 2, 3], keepdims=True)
    pixels = float(images.shape[1] * images.shape[2] * images.shape[3])
    return (images - mean) / tf.maximum(tf.sqrt(variance), 1.0 / np.sqrt(pixels))


def tutorial_train(images: Any, draw: Any) -> Any:
    """The distortions of TensorFlow's tutorial: random 24x24 crop, flip, brightness, contrast; standardised."""
    choices = SIDE - TUTORIAL_SIDE + 1
    cut = _crop_and_flip(
        images, _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices), draw[:, 2] < 0.5, TUTORIAL_SIDE
    )
    cut = tf.cast(cut, tf.float32)
    brightness = (draw[:, 3] * 2.0 - 1.0) * 63.0
    contrast = 0.2 + draw[:, 4] * 1.6
    cut += brightness[:, None, None, None]
    channel_mean = tf.reduce_mean(cut, axis=[1, 2], keepdims=True)
    cut = (cut - channel_mean) * contrast[:, None, None, None] + channel_mean
    return _standardise_each(cut)


def tutorial_test(images: Any) -> Any:
    """The middle 24x24 pixels, standardised per image."""
    edge = (SIDE - TUTORIAL_SIDE) // 2
    cut = images[:, edge : edge + TUTORIAL_SIDE, edge : edge + TUTORIAL_SIDE, :]
    return _standardise_each(tf.cast(cut, tf.float32))


def _standardise_channels(images: Any) -> Any:
    return (tf.cast(images, tf.float32) - tf.constant(CHANNEL_MEAN)) * (1.0 / tf.constant(CHANNEL_DEVIATION))


def standard_train(images: Any, draw: Any) -> Any:
    """Four pixels of padding, random 32x32 crop, flip, channels standardised (He et al. 2015, section 4.2).

    The padding has the colour of the channel means, so that it is zero in the standardised image (to 0.01).
    """
    padded = tf.ensure_shape(tf.numpy_function(_pad_with_mean, [images], tf.uint8), [None, *[SIDE + 2 * PAD] * 2, 3])
    choices = 2 * PAD + 1
    cut = _crop_and_flip(padded, _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices), draw[:, 2] < 0.5, SIDE)
    return _standardise_channels(cut)


def _pad_with_mean(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    padded = np.empty((len(images), SIDE + 2 * PAD, SIDE + 2 * PAD, 3), np.uint8)
    padded[:] = np.round(CHANNEL_MEAN).astype(np.uint8)
    padded[:, PAD:-PAD, PAD:-PAD] = images
    return padded


def standard_test(images: Any) -> Any:
    """The whole image, channels standardised."""
    return _standardise_channels(images)


def fast_train(images: Any, draw: Any) -> Any:
    """Moved by up to two pixels with a mirrored edge, and the flip that alternates; channels standardised.

    Source: Jordan 2024, sections 3.1 and 3.6.
    """
    edges = [(0, 0), (FAST_PAD, FAST_PAD), (FAST_PAD, FAST_PAD), (0, 0)]
    padded = tf.numpy_function(lambda array: np.pad(array, edges, mode="reflect"), [images], tf.uint8)
    padded = tf.ensure_shape(padded, [None, *[SIDE + 2 * FAST_PAD] * 2, 3])
    choices = 2 * FAST_PAD + 1
    cut = _crop_and_flip(padded, _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices), draw[:, 5] > 0, SIDE)
    return _standardise_channels(cut)


def six_views(images: Any) -> list[tuple[float, Any]]:
    """Test images [b, side, side, 3] and their weights in an average: as they are, moved by a pixel up and left, and
    down and right, and all of these mirrored (Jordan 2024, section 3.5)."""
    side = images.shape[1]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")
    moved = [padded[:, offset : offset + side, offset : offset + side] for offset in (0, 2)]
    weighted = [(0.25, images), *((0.125, image) for image in moved)]
    return [*weighted, *((weight, image[:, :, ::-1]) for weight, image in weighted)]


TUTORIAL_VIEWS = Views(TUTORIAL_SIDE, tutorial_train, tutorial_test)
STANDARD_VIEWS = Views(SIDE, standard_train, standard_test)
FAST_VIEWS = Views(SIDE, fast_train, standard_test)
