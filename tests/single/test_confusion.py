"""The confusion matrix and the worst mistakes of an evaluation: what a rank counts, and what the file holds."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.extensions import confusion
from hvd_cifar.files import read_json
from hvd_cifar.training.confusion import WORST, Confusion, Mistake, Tally


def _written(folder: Path, found: Confusion, dataset: Dataset) -> Any:
    confusion.write(folder, found, dataset, 40)
    return read_json(folder / "confusion.json")


def test_a_tally_has_a_row_for_each_true_class_and_the_largest_losses_first() -> None:
    labels = np.array([0, 1, 2, 1, 0], np.int32)
    logits = np.array([[2.0, 0, 0], [0, 0, 1], [0, 0, 3], [5, 0, 0], [0, 1, 0]])
    losses = np.array([0.1, 0.9, 0.05, 4.0, 0.9])
    tally = Tally(3)
    for part in (slice(0, 2), slice(2, 5)):
        tally.add(10 + 2 * np.arange(5)[part], labels[part], losses[part], logits[part])
    assert tally.matrix.tolist() == [[1, 1, 0], [1, 0, 1], [0, 0, 1]]
    assert [(m.example, m.label, m.predicted) for m in tally.mistakes] == [(16, 1, 0), (12, 1, 2), (18, 0, 1)]
    assert tally.mistakes[0].probabilities == pytest.approx(np.exp([5, 0, 0]) / (np.exp(5) + 2), abs=1e-6)


def test_a_tally_keeps_the_worst_mistakes_alone() -> None:
    count = 4 * WORST
    losses = np.random.default_rng(0).permutation(count).astype(float)
    tally = Tally(2)
    for part in np.split(np.arange(count), 4):
        tally.add(part, np.zeros(len(part), np.int32), losses[part], np.tile([0.0, 1.0], (len(part), 1)))
    assert [m.loss for m in tally.mistakes] == list(range(count - 1, count - 1 - WORST, -1))


@pytest.mark.parametrize("channels", [1, 3])
def test_the_file_holds_the_image_of_each_mistake(channels: int, tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (4, 5, 7, channels), np.uint8)
    labels = np.array([0, 1, 1, 0])
    dataset = Dataset.from_arrays(images, labels, images[::-1], labels)
    found = Confusion(np.array([[1, 1], [0, 2]]), [Mistake(2.5, 3, 0, 1, [0.2, 0.8])])
    content = _written(tmp_path, found, dataset)
    assert {name: content[name] for name in ("step", "split", "class_names", "matrix")} == {
        "step": 40,
        "split": "test",
        "class_names": ["0", "1"],
        "matrix": [[1, 1], [0, 2]],
    }
    (mistake,) = content["mistakes"]
    kind, _, text = mistake.pop("image").partition(",")
    assert kind == "data:image/png;base64"
    assert mistake == {"index": 3, "label": 0, "predicted": 1, "probabilities": [0.2, 0.8]}
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(text)))).reshape(5, 7, channels)
    assert (shown == images[0]).all()


def test_readers_take_the_file_of_large_images(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (2, 1200, 800, 3), np.uint8)
    dataset = Dataset.from_arrays(images, np.arange(2), images, np.arange(2))
    found = Confusion(np.array([[0, WORST], [0, 0]]), [Mistake(2.5, 0, 0, 1, [0.2, 0.8])] * WORST)
    content = _written(tmp_path, found, dataset)
    shown = Image.open(io.BytesIO(base64.b64decode(content["mistakes"][0]["image"].partition(",")[2])))
    assert shown.size == (171, 256)
