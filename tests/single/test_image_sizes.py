"""Progressive resizing: which step trains on which size, and what shrinking makes of an image."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import UserError
from hvd_cifar.training.image_sizes import ImageSizes, shrink
from hvd_cifar.training.recipe import resolve


def test_sizes_take_turns_in_equal_parts() -> None:
    sizes = ImageSizes((20, 24, 32), 10)
    assert [sizes(step) for step in range(10)] == [20] * 4 + [24] * 3 + [32] * 3
    assert [ImageSizes((20, 24, 32), 441)(step) for step in (0, 146, 147, 293, 294, 440)] == [20, 20, 24, 24, 32, 32]
    assert {ImageSizes((32,), 7)(step) for step in range(8)} == {32}


@pytest.mark.parametrize("side", [8, 20, 24, 31])
def test_images_are_shrunk_as_tensorflow_does(side: int) -> None:
    images = tf.constant(np.random.default_rng(0).normal(size=(5, 32, 32, 3)), tf.float32)
    expected = tf.image.resize(images, (side, side), antialias=True)
    assert np.allclose(shrink(images, side), expected, atol=1e-4)  # the library's weights are rounded
    exact = shrink(tf.cast(images, tf.float64), side)
    assert exact.dtype == tf.float64 and np.allclose(exact, expected, atol=1e-4)
    constant = tf.ones((1, 32, 32, 3), tf.float64)
    assert np.allclose(shrink(constant, side), 1.0, rtol=1e-14)


def test_only_a_net_that_takes_any_size_is_given_several() -> None:
    assert resolve(make(TrainSettings, {"model": "resnet20"})).image_sizes == ()
    assert resolve(make(TrainSettings, {"model": "resnet20", "image_sizes": "16, 32"})).image_sizes == (16, 32)
    assert resolve(make(TrainSettings, {"model": "fast", "image_sizes": [32]})).image_sizes == (32,)
    with pytest.raises(UserError, match="--image-sizes: the tutorial's net"):
        make(TrainSettings, {"model": "tutorial", "image_sizes": "16,32"})


@pytest.mark.parametrize("given", ["", "20;24", "4,24", "8", "24,33", "-20", "20.5"])
def test_sizes_that_are_none_are_refused(given: str) -> None:
    with pytest.raises(UserError, match="--image-sizes"):
        make(TrainSettings, {"image_sizes": given})
