"""Accuracy and loss on a whole set. Every example counts once, so results do not depend on the number of ranks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import evaluation_batches
from hvd_cifar.data.sampler import spread
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.world import World
from hvd_cifar.training.confusion import MOST_CLASSES, Confusion, Tally
from hvd_cifar.training.sources import read_batches
from hvd_cifar.training.step import cross_entropy

MOST_AT_ONCE = 500  # examples: large enough to be fast, and fits any device


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


def make_evaluator(
    model: keras.Model,
    dataset: Dataset,
    transforms: Transforms,
    world: World,
    batch_size: int | None = None,
    count: int | None = None,
    part: str = "test",
) -> Callable[[bool], Evaluation]:
    """A function (six_views) that evaluates the model on `count` examples of a part, evenly spaced. It is a collective.

    A rank evaluates `batch_size` examples at a time, by default `examples_at_once`.

    Batch norm's moving statistics must be the same on all ranks: see `callbacks.MovingStatistics`.
    """
    examples = getattr(dataset, part)
    chosen = spread(len(examples) if count is None else count, len(examples))
    batches = evaluation_batches(
        examples,
        transforms,
        batch_size=batch_size or examples_at_once(dataset.image_shape, transforms.shape),
        rank=world.rank,
        size=world.size,
        chosen=chosen,
    )

    @tf.function(reduce_retracing=True, autograph=False)
    def answer(image: Any, label: Any, many: bool) -> Any:
        logits, plain = logits_of(model, image, many)
        return tf.cast(cross_entropy(label, logits), tf.float64), logits, plain

    def evaluate(many: bool = False) -> Evaluation:
        totals, seen = np.zeros(3), 0
        tally = Tally(dataset.classes) if dataset.classes <= MOST_CLASSES else None
        for image, label in read_batches(batches):
            losses, logits, plain = (value.numpy() for value in answer(image, label, many))
            labels = label.numpy()
            hits = [(answers.argmax(axis=-1) == labels).sum() for answers in (logits, plain)]
            if tally:
                here = world.rank + world.size * (seen + np.arange(len(labels)))
                tally.add(chosen[here], labels, losses, logits)
            totals += [losses.sum(), *hits]
            seen += len(labels)
        # Horovod: sums and counts, since ranks with different numbers of examples cannot average means.
        own = [*totals, seen, *(tally.matrix.ravel() if tally else ())]
        entropy, right, plain_right, examples, *matrix = collectives.all_reduce_sums(own)
        return Evaluation(
            accuracy=right / examples,
            loss=entropy / examples,
            examples=round(examples),
            plain_accuracy=plain_right / examples,
            views=6 if many else 1,
            confusion=tally.of_all(matrix) if tally else None,
            part=part,
        )

    return evaluate


def examples_at_once(*shapes: tuple[int, int, int]) -> int:
    """The number of examples to evaluate at a time: 500 of 32 x 32 pixels, and fewer of larger images.

    Args:
        shapes: of images before and after their transforms, (height, width, channels).
    """
    pixels = max(height * width for height, width, _ in shapes)
    return max(1, min(MOST_AT_ONCE, MOST_AT_ONCE * 32 * 32 // pixels))


def logits_of(model: keras.Model, images: Any, many: bool) -> tuple[Any, Any]:
    """Logits [b, classes] in float32 or better: averaged over six views if `many`, and of the image as it is.

    Args:
        images: float [b, height, width, channels], tensors or Keras's symbolic ones.
    """
    exact = "float64" if model.compute_dtype == "float64" else "float32"
    weighted = six_views(images) if many else [(1.0, images)]
    found = [(weight, keras.ops.cast(model(view, training=False), exact)) for weight, view in weighted]
    return functools.reduce(operator.add, (weight * logits for weight, logits in found)), found[0][1]


def six_views(images: Any) -> list[tuple[float, Any]]:
    """Views of test images [b, height, width, channels], and their weights in an average (Jordan 2024, section 3.5).

    The image itself, shifted by a pixel down and right, and up and left; and the mirror images of all three.
    """
    height, width = images.shape[1:3]
    padded = keras.ops.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="reflect")
    moved = [padded[:, offset : offset + height, offset : offset + width] for offset in (0, 2)]
    weighted = [(0.25, images), *((0.125, image) for image in moved)]
    return [*weighted, *((weight, image[:, :, ::-1]) for weight, image in weighted)]
