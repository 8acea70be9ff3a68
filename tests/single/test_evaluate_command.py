"""Another data set for a run's net: its classes and image size must be those that the net has learnt."""

from __future__ import annotations

import numpy as np
import pytest

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.errors import UserError
from hvd_cifar.training.evaluate import examples_at_once
from hvd_cifar.training.trained import as_learnt


def _set(classes: int, names: tuple[str, ...] = (), shape: tuple[int, int, int] = (5, 5, 1)) -> Dataset:
    images, labels = np.zeros((4, *shape), np.uint8), np.arange(4) % classes
    return Dataset.from_arrays(images, labels, images, labels, name="new", class_names=names)


@pytest.mark.parametrize(("side", "examples"), [(6, 500), (32, 500), (64, 125), (224, 10), (4096, 1)])
def test_fewer_large_images_are_evaluated_at_a_time(side: int, examples: int) -> None:
    assert examples_at_once((side, side, 3), (6, 6, 3)) == examples_at_once((6, 6, 3), (side, side, 3)) == examples


@pytest.mark.parametrize(
    ("learnt", "given"),
    [
        (_set(2, ("ant", "bee")), _set(2, ("bee", "ant"))),
        (_set(2, ("ant", "bee")), _set(2, ("ant", "cat"))),
        (_set(2), _set(3)),
    ],
)
def test_other_classes_are_refused(learnt: Dataset, given: Dataset) -> None:
    with pytest.raises(UserError, match=r"^data set new: its classes \(.*are not the run's, in their order"):
        as_learnt(given, learnt, any_size=True)


@pytest.mark.parametrize("shape", [(5, 6, 1), (6, 5, 1), (5, 5, 3)])
def test_images_of_another_size_are_refused_unless_the_transforms_are_the_user_s(shape: tuple[int, int, int]) -> None:
    given, learnt = _set(2, shape=shape), _set(2)
    sizes = f"{' x '.join(map(str, shape))} and the run's 5 x 5 x 1"
    with pytest.raises(UserError, match=rf"^data set new: its images are {sizes} \(height x width x channels\): give"):
        as_learnt(given, learnt, any_size=False)
    assert as_learnt(given, learnt, any_size=True).channel_mean == learnt.channel_mean
