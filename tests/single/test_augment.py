"""Distortions: the pixels they take, and that they depend on nothing but (seed, epoch, example)."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar.data import augment
from hvd_cifar.data.augment import Transforms, transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.training.evaluate import six_views


def _transforms(name: str, height: int = 32, width: int = 32, channels: int = 3) -> Transforms:
    """For images of this shape, with CIFAR-10's mean and deviation as far as there are channels."""
    images, labels = np.zeros((1, height, width, channels), np.uint8), [1]
    mean, deviation = (125.3, 123.0, 113.9, 100.0), (63.0, 62.1, 66.7, 50.0)
    plain = Dataset.from_arrays(images, labels, images, labels)
    return transforms(name, replace(plain, channel_mean=mean[:channels], channel_deviation=deviation[:channels]))


STANDARD, TUTORIAL = _transforms("standard"), _transforms("tutorial")


def _images(count: int = 6) -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 256, (count, 32, 32, 3)).astype(np.uint8)


def _draws(rows: list[list[float]]) -> np.ndarray[Any, Any]:
    return np.asarray(rows, np.float32)


@given(st.integers(0, 2**63 - 1), st.integers(0, 500), st.lists(st.integers(0, 49_999), min_size=1, max_size=20))
def test_draws_do_not_depend_on_the_batch(seed: int, epoch: int, examples: list[int]) -> None:
    together = augment.draws(seed, epoch, np.asarray(examples))
    alone = np.concatenate([augment.draws(seed, epoch, np.asarray([e])) for e in examples])
    assert (together == alone).all()
    uniform = together[:, : augment.RANDOM_DRAWS]
    assert ((uniform >= 0) & (uniform < 1)).all()


def test_tutorial_distortions_equal_tensorflow_s_own_one_by_one() -> None:
    images = _images(4)
    draw = augment.draws(1, 2, np.arange(4))
    got = TUTORIAL.train(images, draw)
    for image, (row, column, flip, brightness, contrast, _), ours in zip(images, draw, got, strict=True):
        top, left = int(row * 9), int(column * 9)
        cut = tf.cast(image[top : top + 24, left : left + 24], tf.float32)
        cut = tf.image.flip_left_right(cut) if flip < 0.5 else cut
        cut = tf.image.adjust_brightness(cut, (brightness * 2 - 1) * 63)
        cut = tf.image.adjust_contrast(cut, 0.2 + contrast * 1.6)
        assert np.allclose(ours, tf.image.per_image_standardization(cut).numpy(), atol=2e-4)


@pytest.mark.parametrize("shape", [(32, 32, 3), (300, 400, 3)])
def test_test_transforms_are_plain(shape: tuple[int, int, int]) -> None:
    height, width, _ = shape
    images = np.random.default_rng(6).integers(0, 256, (2, *shape)).astype(np.uint8)
    top, left, seen = height // 8, width // 8, _transforms("tutorial", *shape)
    middle = images[:, top : top + height * 3 // 4, left : left + width * 3 // 4].astype(np.float64)
    assert np.allclose(seen.test(images), [(m - m.mean()) / m.std() for m in middle], atol=1e-5)
    for grey in (0, 37, 255):
        assert (seen.test(np.full((1, *shape), grey, np.uint8)) == 0).all()  # no division by a deviation of zero


@pytest.mark.parametrize("name", ["tutorial", "standard", "fast"])
def test_transforms_do_not_depend_on_the_order_in_memory(name: str) -> None:
    by_pixel = _images()
    by_plane = np.ascontiguousarray(by_pixel.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)  # as it comes from the files
    draw, seen = augment.draws(0, 0, np.arange(6)), _transforms(name)
    assert (seen.train(by_pixel, draw) == seen.train(by_plane, draw)).all()
    assert (seen.test(by_pixel) == seen.test(by_plane)).all()


def test_the_flip_alternates_from_a_random_side() -> None:
    examples = np.arange(10_000)
    flips = [augment.draws(4, epoch, examples)[:, -1] for epoch in range(3)]
    assert set(flips[0]) == {0.0, 1.0} and abs(flips[0].mean() - 0.5) < 0.03
    assert (flips[1] == 1 - flips[0]).all() and (flips[2] == flips[0]).all()
    other = augment.draws(5, 0, examples)[:, -1]
    assert abs((flips[0] == other).mean() - 0.5) < 0.03


# SHA-256 of the bits of what nets see of the first test images below: a run that is resumed under a later version of
# this program, or of NumPy, sees the same.
BITS = {
    "fast": "265dbc8ac7903a9aa59abc6858e5c5abeaf4fcfce1923e9509cdd4b8580e6a2f",
    "standard": "f7902e003117114cb3ea1303695881f6bd27a46e964924c4ebf94254ae7cac9f",
    "tutorial": "c2a8598aaf6da38436f2db8387bcd63689038785e56201eb5c545bf59c583fd8",
    "none": "6fb48e1266c4f268c2e8e11bd52ca0bc9d25727c97cb38c3479ffddfe4b09a51",
}


@pytest.mark.parametrize("name", BITS)
def test_the_bits_of_a_view_are_fixed_for_ever(name: str) -> None:
    images = (np.arange(8 * 32 * 32 * 3) * 2654435761 >> 7).astype(np.uint8).reshape(8, 32, 32, 3)
    seen = _transforms(name)
    state = hashlib.sha256(seen.train(images, augment.draws(3, 1, np.arange(8))).tobytes())
    state.update(seen.test(images).tobytes())
    assert state.hexdigest() == BITS[name]


@pytest.mark.parametrize("name", ["standard", "fast"])
@pytest.mark.parametrize(("side", "pad"), [(4, 0), (9, 1), (28, 3), (224, 4)])
def test_pads_are_in_proportion_to_small_images(name: str, side: int, pad: int) -> None:
    """Moved as far as can be: what was the image's corner is `pad` pixels further on."""
    pad = pad if name == "standard" else pad // 2
    seen = _transforms(name, side, side + 1, 1)
    image = np.zeros((1, side, side + 1, 1), np.uint8)
    image[0, 0, 0] = 255
    moved = seen.train(image, _draws([[0.0, 0.0, 0.9, 0, 0, 0]]))
    assert [int(i) for i in np.unravel_index(moved.argmax(), moved.shape)] == [0, pad, pad, 0]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="standard, fast, tutorial, none"):
        _transforms("stanard")


def test_six_views_are_an_average_of_moved_and_mirrored_images() -> None:
    images = np.random.default_rng(8).normal(size=(2, 5, 9, 3)).astype(np.float32)
    views = [(weight, view.numpy()) for weight, view in six_views(tf.constant(images))]
    assert [weight for weight, _ in views] == [0.25] * 2 + [0.125] * 4
    padded = np.pad(images, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect")
    moved = [padded[:, :5, :9], padded[:, 2:, 2:]]
    expected = [images, images[:, :, ::-1], *moved, *(e[:, :, ::-1] for e in moved)]
    for (_, view), image in zip(views, expected, strict=True):
        assert view.shape == images.shape and (view == image).all()
