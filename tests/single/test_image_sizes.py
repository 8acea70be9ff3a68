"""Progressive resizing: which step trains on which size, and what shrinking makes of an image."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import nets
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.errors import UserError
from hvd_cifar.models import Model
from hvd_cifar.optim.schedules import ImageSizes
from hvd_cifar.training.plan import changed, resolve
from hvd_cifar.training.shrink import shrink
from hvd_cifar.training.work import make_net, work_of

IMAGES = np.zeros((4, 32, 32, 3), np.uint8)
DATA = Dataset.from_arrays(IMAGES, [0, 1, 2, 3], IMAGES, [0, 1, 2, 3])


def _changed(model: Model, settings: TrainSettings) -> Model:
    assert model.recipe is not None
    return replace(model, recipe=changed(model.recipe, settings))


def test_sizes_take_turns_in_equal_parts() -> None:
    sizes = ImageSizes((20, 24, 32), 10)
    assert [sizes(step) for step in range(10)] == [20] * 4 + [24] * 3 + [32] * 3
    assert {ImageSizes((32,), 7)(step) for step in range(8)} == {32}


@pytest.mark.parametrize("side", [8, 24, 31])
def test_images_are_shrunk_as_tensorflow_does(side: int) -> None:
    images = tf.constant(np.random.default_rng(0).normal(size=(5, 32, 32, 3)), tf.float64)
    expected = tf.image.resize(images, (side, side), antialias=True)
    assert np.allclose(shrink(images, side), expected, atol=1e-4)  # the library's weights are rounded
    assert np.allclose(shrink(tf.ones((1, 32, 32, 3), tf.float64), side), 1.0, rtol=1e-14)


@pytest.mark.parametrize(
    ("shape", "given", "sizes"),
    [
        ((32, 32, 3), {}, (24, 24, 32)),
        ((96, 96, 3), {}, (72, 72, 96)),
        ((96, 96, 3), {"image_scales": "0.25,1"}, (24, 96)),
        ((28, 28, 1), {"image_scales": (0.001,)}, (1,)),
    ],
)
def test_a_recipe_s_sizes_are_parts_of_the_images_own(shape: Any, given: Any, sizes: tuple[int, ...]) -> None:
    images = np.zeros((4, *shape), np.uint8)
    settings = resolve(make(TrainSettings, {"batch_size": 2, "set": given}), nets.recipe_of("fast"))
    data = Dataset.from_arrays(images, range(4), images, range(4))
    assert work_of(settings, data, _changed(nets.MODELS["fast"], settings), 0, 1).image_sizes == sizes


def test_only_a_net_that_takes_any_size_is_given_several() -> None:
    def net(model: str, image_scales: str) -> Any:
        settings = make(TrainSettings, {"batch_size": 2, "model": model, "set": {"image_scales": image_scales}})
        resolved = resolve(settings, nets.recipe_of(settings.model)).model_copy(update={"precision": "float32"})
        return make_net(work_of(resolved, DATA, _changed(nets.MODELS[model], settings), 0, 1))

    net("resnet20", "0.5, 1")
    with pytest.raises(UserError, match="image_scales: the net .* cannot take images of .*expected shape"):
        net("tutorial", "0.5,1")
    with pytest.raises(UserError, match="image_scales: the net fast cannot take images of 7 .*no window of 2 x 2"):
        net("fast", "0.22,1")
