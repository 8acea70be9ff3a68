"""Transforms: the preprocessing of images, random in training and fixed in evaluation.

The random numbers are hashed from (seed, epoch, example), so they depend neither on the batch nor on the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from hvd_cifar.data import pictures, sampler
from hvd_cifar.data.dataset import Dataset

PAD = 4  # pixels on each side of an image of 32 and more, as He et al. 2015 (section 4.2)
FAST_PAD = 2  # the same, for `fast`
SMALLEST_CUT = 64  # pixels

RANDOM_DRAWS = 5  # row offset, column offset, flip, brightness (unused: without it contrast's draws change), contrast
DISTORTIONS, FLIPS, CROPS = 1, 2, 4  # purposes of random numbers, in the key of `sampler.mix`

Images = NDArray[np.uint8]
Floats = NDArray[np.float32]
TrainTransform = Callable[[Images, Floats], Floats]
TestTransform = Callable[[Images], Floats]
Flips = Callable[[Floats], NDArray[np.bool_]]


class Transforms(NamedTuple):
    """The transforms of training and of test images. A recipe may bring its own.

    Both functions make float32 [b, *shape] from images uint8 [b, height, width, channels]. What they make of an image
    must depend on that image and its draws alone, to the bit: only then runs resume exactly and train alike on any
    number of ranks. `draws` are their only random numbers.

    Attributes:
        shape: (height, width, channels) of what the net sees.
        train: (images, draws) -> floats; draws are float32 [b, 6]: five uniform in [0, 1), and a sixth that is 0 or 1,
            in each epoch the other one than in the epoch before.
        test: images -> floats.
        portable: the same as `test` by `keras.ops`, for `export`: tensors float32 [b, height, width, channels] of whole
            numbers -> [b, *shape]. None: nets that are trained with these transforms cannot be exported.
        crops: whether `train` gets a random part of each image where `--image-size` scales images of many sizes
            (`pictures.crop_boxes`), not the middle.
    """

    shape: tuple[int, int, int]
    train: TrainTransform
    test: TestTransform
    portable: Callable[[Any], Any] | None = None
    crops: bool = False


def transforms(name: str, dataset: Dataset) -> Transforms:
    """The transforms that a recipe names: "standard", "fast", "tutorial", or "none"; ValueError for another name."""
    named = {"standard": _standard, "fast": _fast, "tutorial": _tutorial, "none": _plain}
    if name not in named:
        raise ValueError(f"no augmentation is called {name!r}; there are {', '.join(named)}")
    return named[name](dataset)


def fit(images: Any, shape: tuple[int, int, int], is_scaled: bool = False) -> Any:
    """Images uint8 [b, any height, any width, channels] -> whole numbers in float32, [b, *shape]; by `keras.ops`.

    The largest part around the middle that has the shape's proportions is resized, with antialiasing. Images that have
    the shape stay as they are. `is_scaled`: what `pictures.read_image` makes for `--image-size`, to rounding.
    """
    from keras import ops  # only here: the benchmarks use transforms beside PyTorch, without Keras

    size, kind = (pictures.with_margin(shape[:2]), "bicubic") if is_scaled else (shape[:2], "bilinear")
    floats = ops.cast(images, "float32")
    resized = ops.image.resize(floats, size, interpolation=kind, antialias=True, crop_to_aspect_ratio=True)
    top, left = (size[0] - shape[0]) // 2, (size[1] - shape[1]) // 2
    return ops.clip(ops.round(resized[:, top : top + shape[0], left : left + shape[1]]), 0, 255)


def draws(
    seed: int, epoch: int, examples: NDArray[np.int64], purpose: int = DISTORTIONS, count: int = RANDOM_DRAWS
) -> Floats:
    """The random numbers of each example in an epoch, float32 [len(examples), count + 1].

    All but the last are uniform in [0, 1). The last is the alternating flip: 0 or 1 at random in epoch 0, then the
    other one in each next epoch, so that two epochs in a row show both sides of every image (Jordan 2024, section 3.6).
    """
    example, columns = examples.astype(np.uint64), np.arange(1, count + 1, dtype=np.uint64)
    bits = sampler.mix(sampler.mix(example, seed, purpose, epoch)[:, None] ^ sampler.mix(columns)[None, :])
    uniform = (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)  # 24 bits fill a float32's mantissa
    flip = (sampler.mix(example, seed, FLIPS) + np.uint64(epoch)) & np.uint64(1)
    return np.concatenate([uniform, flip[:, None].astype(np.float32)], axis=1)


def _cropped(
    size: tuple[int, int],
    flips: Flips,
    finish: TrainTransform,
    pad: tuple[int, int] = (0, 0),
    colour: NDArray[np.uint8] | None = None,
) -> TrainTransform:
    """Images are padded, cut at random to `size`, mirrored where `flips`, and standardised by `finish`.

    `pad` rows and columns on each side have a colour, uint8 [channels], or mirror the edges.
    """
    above, left = pad

    def train(images: Images, draw: Floats) -> Floats:
        count, height, width, channels = images.shape
        # Planes [b, c, h, w] are the order of CIFAR's files: their rows are quick to cut. Transposing copies nothing.
        planes = images.transpose(0, 3, 1, 2)
        if above or left:
            padded = np.empty((count, channels, height + 2 * above, width + 2 * left), np.uint8)
            if colour is not None:
                padded[:] = colour[:, np.newaxis, np.newaxis]
            padded[:, :, above : above + height, left : left + width] = planes
            if colour is None:  # np.pad's "reflect", in a tenth of its time
                for i in range(above):
                    padded[:, :, above - 1 - i] = padded[:, :, above + 1 + i]
                    padded[:, :, above + height + i] = padded[:, :, above + height - 2 - i]
                for i in range(left):
                    padded[..., left - 1 - i] = padded[..., left + 1 + i]
                    padded[..., left + width + i] = padded[..., left + width - 2 - i]
            planes = padded
        places = [whole - part + 1 for whole, part in zip(planes.shape[2:], size, strict=True)]
        row, column = ((draw[:, i] * np.float32(number)).astype(np.int32) for i, number in enumerate(places))
        windows = sliding_window_view(planes, size, axis=(2, 3))  # [b, c, rows, columns, height, width], no copy
        cut = windows[np.arange(count), :, row, column]
        flip = flips(draw)
        cut[flip] = cut[flip][..., ::-1]
        return finish(cut.transpose(0, 2, 3, 1), draw)

    return train


def _standardise_channels(dataset: Dataset, images: Images, _: Floats | None = None) -> Floats:
    """Images uint8 [b, h, w, c] -> float32 of the same shape, minus the channels' means, over their deviations.

    NumPy's inner loops are as long as the images' order in memory allows: whole rows, or a plane's rows.
    """
    count, height, width, channels = images.shape
    mean = np.array(dataset.channel_mean, np.float32)
    factor = np.float32(1.0) / np.array(dataset.channel_deviation, np.float32)
    floats = np.empty(images.shape, np.float32)
    if images.flags.c_contiguous:
        rows = floats.reshape(count, height, width * channels)
        np.subtract(images.reshape(rows.shape), np.tile(mean, width), out=rows)
        np.multiply(rows, np.tile(factor, width), out=rows)
        return floats
    centred = np.empty((count, height, width), np.float32)
    for channel in range(channels):
        np.subtract(images[..., channel], mean[channel], out=centred)
        np.multiply(centred, factor[channel], out=floats[..., channel])
    return floats


def _standardise_each(images: Images, contrast: NDArray[np.float32] | None = None) -> Floats:
    """Images uint8 -> float32 of zero mean and unit variance per image (tf.image.per_image_standardization).

    `contrast` [b] first multiplies each pixel's distance from its channel's mean (tf.image.adjust_contrast). Both
    together are one multiplication and one addition for each image and channel.
    """
    count, height, width, channels = images.shape
    pixels = height * width
    # Minus 128: the squares of 32 x 32 pixels then add up to at most 2**24, which float32 holds without rounding.
    exact = np.float32 if pixels <= 2**10 else np.float64
    planes = images.transpose(0, 3, 1, 2).reshape(count, channels, pixels)
    values = (planes ^ np.uint8(128)).view(np.int8).astype(np.float32)
    mean = np.einsum("bci->bc", values, dtype=exact).astype(np.float64) / pixels
    variance = np.einsum("bci,bci->bc", values, values, dtype=exact).astype(np.float64) / pixels - np.square(mean)
    factor = np.ones((count, 1)) if contrast is None else contrast[:, None].astype(np.float64)
    offset = mean - mean.mean(axis=1, keepdims=True)
    deviation = np.sqrt((np.square(factor) * variance + np.square(offset)).mean(axis=1, keepdims=True))
    # An image of one colour has no deviation; it becomes zeros.
    scale = 1 / np.maximum(deviation, (channels * pixels) ** -0.5)
    slope = (factor * scale).astype(np.float32)
    # Rounds as the pixels' products do, so that an image of one colour becomes exact zeros.
    shift = (offset * scale).astype(np.float32) - slope * mean.astype(np.float32)
    values *= slope[:, :, None]
    floats = np.empty((count, pixels, channels), np.float32)
    for channel in range(channels):
        np.add(values[:, channel], shift[:, channel, None], out=floats[..., channel])
    return floats.reshape(images.shape)


def _plain(dataset: Dataset) -> Transforms:
    """The whole image, channels standardised."""

    def portable(images: Any) -> Any:
        factor = np.float32(1.0) / np.array(dataset.channel_deviation, np.float32)
        return (images - np.array(dataset.channel_mean, np.float32)) * factor

    standardise = partial(_standardise_channels, dataset)
    return Transforms(dataset.image_shape, standardise, standardise, portable)


def _standard(dataset: Dataset) -> Transforms:
    """Padding with the mean colour, which becomes zero (to 0.01), a random crop, flip (He et al. 2015, section 4.2)."""
    colour = np.array([round(mean) for mean in dataset.channel_mean], np.uint8)
    return _moved(dataset, PAD, lambda draw: draw[:, 2] < 0.5, colour)


def _fast(dataset: Dataset) -> Transforms:
    """Shifts with mirrored edges, and the alternating flip (Jordan 2024)."""
    return _moved(dataset, FAST_PAD, lambda draw: draw[:, 5] > 0)


def _moved(dataset: Dataset, pad: int, flips: Flips, colour: NDArray[np.uint8] | None = None) -> Transforms:
    """Shifts, or random parts of larger images from 64 pixels on, mirrored where `flips`; channels standardised.

    `pad` is the most pixels of a shift, for sides of 32 pixels and more; in proportion below that.
    """
    height, width, channels = dataset.image_shape
    plain = _plain(dataset)
    if min(height, width) >= SMALLEST_CUT and getattr(dataset.train.images, "crops", None) is not None:

        def of_parts(images: Images, draw: Floats) -> Floats:
            flip, pixels = flips(draw), images.view(f"V{channels}")[..., 0]  # a pixel at a time, not a channel
            pixels[flip] = pixels[flip][:, :, ::-1]
            return plain.train(images, draw)

        return plain._replace(train=of_parts, crops=True)
    above, left = (min(pad, side * pad // 32) for side in (height, width))
    return plain._replace(train=_cropped((height, width), flips, plain.train, (above, left), colour))


def _tutorial(dataset: Dataset) -> Transforms:
    """The distortions of TensorFlow's tutorial: random crop of 3/4 of each side, flip, contrast; standardised.

    The test transform takes the middle. Random brightness is left out, since standardisation removes it.
    """
    height, width, channels = dataset.image_shape
    size = max(1, height * 3 // 4), max(1, width * 3 // 4)
    top, left = (height - size[0]) // 2, (width - size[1]) // 2  # of the middle

    def finish(images: Images, draw: Floats) -> Floats:
        return _standardise_each(images, np.float32(0.2) + draw[:, 4] * np.float32(1.6))

    def test(images: Images) -> Floats:
        return _standardise_each(images[:, top : top + size[0], left : left + size[1]])

    def portable(images: Any) -> Any:
        from keras import ops

        middle = images[:, top : top + size[0], left : left + size[1]]
        mean, deviation = (f(middle, axis=(1, 2, 3), keepdims=True) for f in (ops.mean, ops.std))
        return (middle - mean) / ops.maximum(deviation, (channels * size[0] * size[1]) ** -0.5)

    return Transforms((*size, channels), _cropped(size, lambda draw: draw[:, 2] < 0.5, finish), test, portable)
