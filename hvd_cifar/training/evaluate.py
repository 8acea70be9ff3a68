"""Accuracy, loss and confusion on a whole set. Each example counts once, so results do not depend on the ranks."""

from __future__ import annotations

import contextlib
import functools
import json
import operator
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import evaluation_batches
from hvd_cifar.distributed import collectives
from hvd_cifar.files import read_json, replace_text
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training.step import cross_entropy

MOST_AT_ONCE = 500  # examples: large enough to be fast, and fits any device
WORST = 16  # mistakes to keep
MOST_CLASSES = 1000  # a larger confusion matrix takes long to all-reduce


@dataclass(frozen=True)
class Mistake:
    """A test image that the net classifies wrongly."""

    loss: float  # cross-entropy
    index: int  # in the test set
    label: int
    predicted: int
    probabilities: list[float]  # of all classes


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix of an evaluation, and its worst mistakes."""

    matrix: NDArray[np.int64]  # [classes, classes], examples by true class (row) and predicted class (column)
    mistakes: list[Mistake]  # those with the largest losses, the largest first


@dataclass(frozen=True)
class Evaluation:
    """Results over all examples: accuracy as a fraction, loss as mean cross-entropy without weight decay.

    Attributes:
        views: 6 if accuracy and loss average six views of each image, else 1.
        plain_accuracy: accuracy with one view, the image as it is.
        confusion: the confusion matrix and the worst mistakes; None for more than 1,000 classes,
            and from validation ranks.
        step: finished global steps of the weights.
        part: the part of the data set: "test", or "validation" for the training examples that are held out.
    """

    accuracy: float
    loss: float
    examples: int
    plain_accuracy: float
    views: int
    confusion: Confusion | None = field(default=None, repr=False, compare=False)
    step: int = 0
    part: str = "test"

    @property
    def values(self) -> dict[str, float]:
        """The reported values, by name."""
        return {"accuracy": self.accuracy, "loss": self.loss, "examples": self.examples}

    @property
    def summary(self) -> dict[str, Any]:
        """The results on the test set, by their names in summary.json."""
        return {
            "test_accuracy": self.accuracy,
            "test_loss": self.loss,
            "test_views": self.views,
            "test_accuracy_of_one_view": self.plain_accuracy,
            "test_examples": self.examples,
        }

    def write(self, path: Path) -> None:
        """Write it to a JSON file, without its confusion. OSError where that cannot be written."""
        replace_text(path, json.dumps(asdict(replace(self, confusion=None))) + "\n")

    @classmethod
    def read(cls, path: Path) -> Evaluation | None:
        """What `write` has written; None: the file has no evaluation."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return cls(**read_json(path))
        return None


class Tally:
    """A rank's part of a `Confusion`."""

    def __init__(self, classes: int) -> None:
        self.matrix = np.zeros((classes, classes))
        self.mistakes: list[Mistake] = []

    def add(
        self, examples: NDArray[np.int64], labels: NDArray[np.int32], losses: NDArray[np.float64], logits: NDArray[Any]
    ) -> None:
        """Count examples, [b]; logits are [b, classes]."""
        predicted = logits.argmax(axis=-1)
        np.add.at(self.matrix, (labels, predicted), 1)
        wrong = np.flatnonzero(predicted != labels)
        for i in wrong[np.argsort(-losses[wrong], kind="stable")[:WORST]]:
            powers = np.exp(logits[i].astype(np.float64) - logits[i].max())
            place = float(losses[i]), int(examples[i]), int(labels[i]), int(predicted[i])
            self.mistakes.append(Mistake(*place, (powers / powers.sum()).round(6).tolist()))
        self.mistakes = _largest(self.mistakes)

    def of_all(self, matrix: list[float]) -> Confusion:
        """The confusion over all ranks. `matrix`: the sum of their matrices, flat. A collective."""
        mistakes = _largest(m for of_rank in collectives.all_gather_object(self.mistakes) for m in of_rank)
        return Confusion(np.array(matrix).reshape(self.matrix.shape).round().astype(np.int64), mistakes)


def _largest(mistakes: Iterable[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: (-mistake.loss, mistake.index))[:WORST]


def make_evaluator(
    model: keras.Model, dataset: Dataset, transforms: Transforms, world: World, part: str = "test"
) -> Callable[[bool], Evaluation]:
    """A function (six_views) that evaluates the model on a part of the data set. It is a collective.

    Batch norm's moving statistics must be the same on all ranks: see `TrainState.average`.
    """
    examples, at_once = getattr(dataset, part), examples_at_once(dataset.image_shape, transforms.shape)
    given = {"batch_size": at_once, "rank": world.rank, "size": world.size}

    @tf.function(reduce_retracing=True, autograph=False)
    def look(image: Any, label: Any, six_views: bool) -> Any:
        plain = logits_of(model, image)
        logits = logits_of(model, image, many=True) if six_views else plain
        return tf.cast(cross_entropy(label, logits), tf.float64), logits, plain

    def evaluate(six_views: bool = False) -> Evaluation:
        totals, seen = np.zeros(3), 0
        tally = Tally(dataset.classes) if dataset.classes <= MOST_CLASSES else None
        for image, labels in evaluation_batches(examples, transforms, **given):
            losses, logits, plain = (value.numpy() for value in look(image, labels, six_views))
            label = labels.numpy()
            right, plain_right = ((found.argmax(axis=-1) == label).sum() for found in (logits, plain))
            totals += losses.sum(), right, plain_right
            if tally:
                tally.add(world.rank + world.size * (seen + np.arange(len(label))), label, losses, logits)
            seen += len(label)
            Watch.sign_of_life()
        # Horovod: sums and counts, since ranks with different numbers of examples cannot average means.
        own = [*totals, seen, *(tally.matrix.ravel() if tally else ())]
        entropy, right, plain_right, count, *matrix = collectives.all_reduce_sums(own)
        return Evaluation(
            accuracy=right / count,
            loss=entropy / count,
            examples=round(count),
            plain_accuracy=plain_right / count,
            views=6 if six_views else 1,
            confusion=tally.of_all(matrix) if tally else None,
            part=part,
        )

    return evaluate


def examples_at_once(*shapes: tuple[int, int, int]) -> int:
    """Examples to evaluate at a time: 500 of 32 x 32 pixels, and fewer of larger images of these shapes."""
    pixels = max(height * width for height, width, _ in shapes)
    return max(1, min(MOST_AT_ONCE, MOST_AT_ONCE * 32 * 32 // pixels))


def logits_of(model: keras.Model, images: Any, many: bool = False) -> Any:
    """Logits [b, classes] in float32 or better of images float [b, height, width, channels]; `many`: of `six_views`."""
    exact = "float64" if model.compute_dtype == "float64" else "float32"
    weighted = six_views(images) if many else [(1.0, images)]
    logits = (weight * keras.ops.cast(model(view, training=False), exact) for weight, view in weighted)
    return functools.reduce(operator.add, logits)


def six_views(images: Any) -> list[tuple[float, Any]]:
    """Views of test images [b, height, width, channels], and their weights in an average (Jordan 2024, section 3.5).

    The image, its mirror image, the image shifted by a pixel down and right, and up and left, their mirror images.
    """
    height, width = images.shape[1:3]
    padded = keras.ops.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="reflect")
    shifted = [padded[:, offset : offset + height, offset : offset + width] for offset in (0, 2)]
    moved = [(1 / 8, view) for view in (*shifted, *(view[:, :, ::-1] for view in shifted))]
    return [(1 / 4, images), (1 / 4, images[:, :, ::-1]), *moved]
