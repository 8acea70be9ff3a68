"""Random distortion of training images, and the plain view of test images.

What happens to an example is a pure function of (seed, epoch, example): the draws are hashed from these three, so
they depend neither on the batch nor on the rank that the example falls into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hvd_cifar.data import sampler

# Mean and standard deviation of CIFAR-10's training pixels per channel (red, green, blue), on the scale 0 to 255.
CHANNEL_MEAN = (125.3, 123.0, 113.9)
CHANNEL_DEVIATION = (63.0, 62.1, 66.7)
SIDE = 32  # pixels
TUTORIAL_SIDE = 24  # pixels, the crop of TensorFlow's tutorial
PAD = 4  # pixels, on each side, as He et al. 2015 (section 4.2)

FAST_PAD = 2  # pixels, on each side, for `fast`

RANDOM_DRAWS = 5  # row offset, column offset, flip, brightness (which no view uses), contrast
DRAWS_PER_EXAMPLE = RANDOM_DRAWS + 1  # and the alternating flip

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]
# images uint8 [b, 32, 32, 3], draws float32 [b, DRAWS_PER_EXAMPLE] -> float32 [b, side, side, 3]
TrainView = Callable[[Images, NDArray[np.float32]], Floats]
# images uint8 [b, 32, 32, 3] -> float32 [b, side, side, 3]
TestView = Callable[[Images], Floats]


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
    base = sampler.mix(examples.astype(np.uint64) ^ sampler.key(seed, 1, epoch))
    columns = np.arange(1, RANDOM_DRAWS + 1, dtype=np.uint64)
    bits = sampler.mix(base[:, None] ^ sampler.mix(columns)[None, :])
    uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)  # 24 bits fill a float32's mantissa
    first = sampler.mix(examples.astype(np.uint64) ^ sampler.key(seed, 2))
    flip = ((first + np.uint64(epoch)) & np.uint64(1)).astype(np.float32)
    return np.concatenate([uniform, flip[:, None]], axis=1)


def _offsets(draw: NDArray[np.float32], choices: int) -> NDArray[np.int32]:
    """Uniform numbers in [0, 1) -> int32 in 0 .. choices - 1."""
    return (draw * np.float32(choices)).astype(np.int32)


def _planes(images: Images) -> Images:
    """[b, h, w, c] -> [b, c, h, w], no copy: as the files have them, whose rows of 32 bytes are quick to cut."""
    return images.transpose(0, 3, 1, 2)


def _cut(planes: Images, row: NDArray[Any], column: NDArray[Any], flip: NDArray[Any], side: int) -> Images:
    """[side, side] out of planes uint8 [b, c, h, w] at (row, column), int [b], mirrored where flip, bool [b]."""
    windows = sliding_window_view(planes, (side, side), axis=(2, 3))  # [b, c, places, places, side, side], no copy
    cut: Images = windows[np.arange(len(planes)), :, row, column]
    cut[flip] = cut[flip][..., ::-1]
    return cut


def _standardise_channels(planes: Images) -> Floats:
    """Planes uint8 [b, 3, h, w] -> float32 [b, h, w, 3], minus the channels' means, over their deviations.

    A channel at a time: NumPy's inner loops are then whole rows, not the three values of a pixel.
    """
    count, _, height, width = planes.shape
    images = np.empty((count, height, width, 3), np.float32)
    centred = np.empty((count, height, width), np.float32)
    for channel, (mean, deviation) in enumerate(zip(CHANNEL_MEAN, CHANNEL_DEVIATION, strict=True)):
        np.subtract(planes[:, channel], np.float32(mean), out=centred)
        np.multiply(centred, np.float32(1.0) / np.float32(deviation), out=images[..., channel])
    return images


def _standardise_each(planes: Images, contrast: NDArray[np.float32] | None = None) -> Floats:
    """[b, c, h, w] -> [b, h, w, c] of zero mean and unit variance per image (tf.image.per_image_standardization).

    Before that, with `contrast` [b], what a pixel differs from its channel's mean by is multiplied (adjust_contrast).
    Both together are one multiplication and one addition for each image and channel.
    """
    count, channels, height, width = planes.shape
    pixels = height * width
    # Minus 128: then float32 adds up the squares of 32 x 32 pixels without rounding: they are at most 2**24.
    values = (planes.reshape(count, channels, pixels) ^ np.uint8(128)).view(np.int8).astype(np.float32)
    mean = np.einsum("bci->bc", values).astype(np.float64) / pixels
    variance = np.einsum("bci,bci->bc", values, values).astype(np.float64) / pixels - np.square(mean)
    factor = np.ones((count, 1)) if contrast is None else contrast[:, None].astype(np.float64)
    offset = mean - mean.mean(axis=1, keepdims=True)
    deviation = np.sqrt((np.square(factor) * variance + np.square(offset)).mean(axis=1, keepdims=True))
    # An image of one colour has no deviation; it becomes zeros.
    scale = 1 / np.maximum(deviation, (channels * pixels) ** -0.5)
    slope = (factor * scale).astype(np.float32)
    # Rounded as the pixels' own products are, so that an image of one colour comes out as zeros, exactly.
    shift = (offset * scale).astype(np.float32) - slope * mean.astype(np.float32)
    values *= slope[:, :, None]
    images = np.empty((count, pixels, channels), np.float32)
    for channel in range(channels):
        np.add(values[:, channel], shift[:, channel, None], out=images[..., channel])
    return images.reshape(count, height, width, channels)


def tutorial_train(images: Images, draw: NDArray[np.float32]) -> Floats:
    """The distortions of TensorFlow's tutorial: random 24x24 crop, flip, contrast; standardised.

    The tutorial's random brightness is left out: what it adds to all of an image, standardising takes away again.
    """
    choices = SIDE - TUTORIAL_SIDE + 1
    row, column = _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices)
    cut = _cut(_planes(images), row, column, draw[:, 2] < 0.5, TUTORIAL_SIDE)
    return _standardise_each(cut, np.float32(0.2) + draw[:, 4] * np.float32(1.6))


def tutorial_test(images: Images) -> Floats:
    """The middle 24x24 pixels, standardised per image."""
    edge = (SIDE - TUTORIAL_SIDE) // 2
    return _standardise_each(_planes(images)[:, :, edge : edge + TUTORIAL_SIDE, edge : edge + TUTORIAL_SIDE])


def standard_train(images: Images, draw: NDArray[np.float32]) -> Floats:
    """Four pixels of padding, random 32x32 crop, flip, channels standardised (He et al. 2015, section 4.2).

    The padding has the colour of the channel means, so that it is zero in the standardised image (to 0.01).
    """
    padded = np.empty((len(images), 3, SIDE + 2 * PAD, SIDE + 2 * PAD), np.uint8)
    for channel, mean in enumerate(CHANNEL_MEAN):
        padded[:, channel] = round(mean)
    padded[:, :, PAD:-PAD, PAD:-PAD] = _planes(images)
    choices = 2 * PAD + 1
    row, column = _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices)
    return _standardise_channels(_cut(padded, row, column, draw[:, 2] < 0.5, SIDE))


def standard_test(images: Images) -> Floats:
    """The whole image, channels standardised."""
    return _standardise_channels(_planes(images))


def fast_train(images: Images, draw: NDArray[np.float32]) -> Floats:
    """Moved by up to two pixels with a mirrored edge, and the flip that alternates; channels standardised.

    Source: Jordan 2024, sections 3.1 and 3.6.
    """
    padded = _mirror_edges(_planes(images), FAST_PAD)
    choices = 2 * FAST_PAD + 1
    row, column = _offsets(draw[:, 0], choices), _offsets(draw[:, 1], choices)
    return _standardise_channels(_cut(padded, row, column, draw[:, 5] > 0, SIDE))


def _mirror_edges(planes: Images, pad: int) -> Images:
    """np.pad's "reflect" of the last two axes, in a tenth of its time."""
    count, channels, height, width = planes.shape
    padded = np.empty((count, channels, height + 2 * pad, width + 2 * pad), np.uint8)
    middle = slice(pad, -pad)
    padded[:, :, middle, middle] = planes
    padded[:, :, :pad, middle] = planes[:, :, pad:0:-1]
    padded[:, :, -pad:, middle] = planes[:, :, -2 : -2 - pad : -1]
    padded[..., :pad] = padded[..., 2 * pad : pad : -1]
    padded[..., -pad:] = padded[..., -2 - pad : -2 - 2 * pad : -1]
    return padded


TUTORIAL_VIEWS = Views(TUTORIAL_SIDE, tutorial_train, tutorial_test)
STANDARD_VIEWS = Views(SIDE, standard_train, standard_test)
FAST_VIEWS = Views(SIDE, fast_train, standard_test)
