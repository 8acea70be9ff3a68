"""Another data set for a run's net: its classes must be those that the net has learnt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.errors import UserError
from hvd_cifar.training import evaluate_command
from hvd_cifar.training.evaluate import examples_at_once

IMAGES = np.zeros((4, 5, 5, 1), np.uint8)


def _set(classes: int, names: tuple[str, ...] = ()) -> Dataset:
    labels = np.arange(4) % classes
    return Dataset.from_arrays(IMAGES, labels, IMAGES, labels, name="new", class_names=names)


def _work(dataset: Dataset) -> Any:
    return SimpleNamespace(dataset=dataset)


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
        evaluate_command._as_learnt(_work(given), learnt)
