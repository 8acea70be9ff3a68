"""What `export` and `predict` tell of a run, and which files of a folder are images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.data import augment
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.errors import UserError
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.tools.export import usable
from hvd_cifar.tools.predict import as_json, as_text, images_in
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.trained import Trained

IMAGES = np.zeros((2, 4, 4, 3), np.uint8)
DATASET = Dataset.from_arrays(IMAGES, np.arange(2), IMAGES, np.arange(2))


def test_transforms_that_are_python_alone_are_refused() -> None:
    given = keras.Input((4, 4, 3))
    model = keras.Model(given, keras.layers.Dense(2)(keras.layers.Flatten()(given)))
    transforms = augment.transforms("none", DATASET)
    trained = Trained(make(TrainSettings, {}), Recipe(), {}, DATASET, model, transforms, TrainState(model))
    assert usable(trained)(IMAGES)["probabilities"].shape == (2, 2)
    python_alone = replace(trained, transforms=trained.transforms._replace(portable=None))
    with pytest.raises(UserError, match="TensorFlow cannot load the Transforms of its recipe: set their `portable`"):
        usable(python_alone)


def test_a_folder_has_its_images_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.jpg", "a.webp", "notes.txt", "c.png/d.gif", "empty/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert images_in(tmp_path) == [tmp_path / name for name in ("a.webp", "b/1.jpg", "b/2.PNG", "c.png/d.gif")]
    assert images_in(tmp_path / "none.png") == [tmp_path / "none.png"]
    with pytest.raises(UserError, match="empty: the folder has no images"):
        images_in(tmp_path / "empty")


def test_names_of_classes_and_images_do_nothing_to_a_terminal() -> None:
    image, classes = Path("a\x1b[2J.png"), [("cat\x1b]0;owned\x07\nfake: dog 99%", 0.75), ("dog", 0.25)]
    assert as_text(image, classes) == r"a\x1b[2J.png: cat\x1b]0;owned\x07\nfake: dog 99% 75.0%, dog 25.0%"
    assert as_json(image, classes).isprintable()
