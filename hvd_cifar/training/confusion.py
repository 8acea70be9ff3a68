"""The confusion matrix of a net, and its worst mistakes."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.files import replace_text

FILE = "confusion.json"
WORST = 16  # mistakes to keep
SIDE = 256  # pixels, the longer side of their images: with larger ones the file is too large for its readers
MOST_CLASSES = 1000  # a larger matrix takes long to all-reduce


class Mistake(NamedTuple):
    """A test image that the net classifies wrongly.

    Attributes:
        loss: cross-entropy.
        example: index in the test set.
        label, predicted: classes.
        probabilities: of all classes.
    """

    loss: float
    example: int
    label: int
    predicted: int
    probabilities: list[float]


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix of an evaluation, and its worst mistakes.

    Attributes:
        matrix: int64 [classes, classes], examples by true class (row) and predicted class (column).
        mistakes: those with the largest losses, the largest first.
    """

    matrix: NDArray[np.int64]
    mistakes: list[Mistake]

    def as_json(self, dataset: Dataset, step: int) -> dict[str, Any]:
        """What confusion.json holds; `dataset` has the images."""
        mistakes = [
            {
                "index": mistake.example,
                "label": mistake.label,
                "predicted": mistake.predicted,
                "probabilities": mistake.probabilities,
                "image": _data_url(dataset.test.images[np.array([mistake.example])][0]),
            }
            for mistake in self.mistakes
        ]
        return {
            "dataset": dataset.name,
            "step": step,
            "split": "test",
            "class_names": list(dataset.labels_in_words),
            "matrix": self.matrix.tolist(),
            "mistakes": mistakes,
        }

    def write(self, folder: Path, dataset: Dataset, step: int) -> Path:
        """Write confusion.json, and return its path. Raises OSError where it cannot be written."""
        path = folder / FILE
        replace_text(path, json.dumps(self.as_json(dataset, step)) + "\n")
        return path


class Tally:
    """A rank's part of a `Confusion`."""

    def __init__(self, classes: int) -> None:
        self.matrix = np.zeros((classes, classes))
        self.mistakes: list[Mistake] = []

    def add(
        self,
        examples: NDArray[np.int64],
        labels: NDArray[np.int32],
        losses: NDArray[np.float64],
        logits: NDArray[np.floating[Any]],
    ) -> None:
        """Count examples, [b]; logits are [b, classes]."""
        predicted = logits.argmax(axis=-1)
        np.add.at(self.matrix, (labels, predicted), 1)
        wrong = np.flatnonzero(predicted != labels)
        worst = wrong[np.argsort(-losses[wrong], kind="stable")[:WORST]]
        for i in worst:
            place = float(losses[i]), int(examples[i]), int(labels[i]), int(predicted[i])
            self.mistakes.append(Mistake(*place, _softmax(logits[i])))
        self.mistakes = _largest(self.mistakes)

    def of_all(self, matrix: Sequence[float]) -> Confusion:
        """The confusion over all ranks. `matrix`: the sum of their matrices, flat. A collective."""
        mistakes = _largest(m for of_rank in collectives.all_gather_object(self.mistakes) for m in of_rank)
        return Confusion(np.array(matrix).reshape(self.matrix.shape).round().astype(np.int64), mistakes)


def _largest(mistakes: Iterable[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: (-mistake.loss, mistake.example))[:WORST]


def _softmax(logits: NDArray[np.floating[Any]]) -> list[float]:
    powers = np.exp(logits.astype(np.float64) - logits.max())
    probabilities: list[float] = (powers / powers.sum()).round(6).tolist()
    return probabilities


def _data_url(image: NDArray[np.uint8]) -> str:
    """An image uint8 [height, width, channels] as a PNG in a data URL. Without 3 channels, only the first is shown."""
    file = io.BytesIO()
    picture = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    picture.thumbnail((SIDE, SIDE))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
