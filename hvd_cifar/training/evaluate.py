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
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training.confusion import MOST_CLASSES, Confusion, Tally
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
    part: str = "test",
) -> Callable[[bool], Evaluation]:
    """A function (six_views) that evaluates the model on a part of the data set. It is a collective.

    A rank evaluates `batch_size` examples at a time, by default `examples_at_once`. Batch norm's moving statistics must
    be the same on all ranks: see `TrainState.average`.
    """
    examples = getattr(dataset, part)
    batch_size = batch_size or examples_at_once(dataset.image_shape, transforms.shape)
    given = {"batch_size": batch_size, "rank": world.rank, "size": world.size}

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
    """The number of examples to evaluate at a time: 500 of 32 x 32 pixels, and fewer of larger images.

    Args:
        shapes: of images before and after their transforms, (height, width, channels).
    """
    pixels = max(height * width for height, width, _ in shapes)
    return max(1, min(MOST_AT_ONCE, MOST_AT_ONCE * 32 * 32 // pixels))


def logits_of(model: keras.Model, images: Any, many: bool = False) -> Any:
    """Logits [b, classes] in float32 or better: of the image as it is, or averaged over `six_views` if `many`.

    Args:
        images: float [b, height, width, channels], tensors or Keras's symbolic ones.
    """
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
    moved = [(1 / 8, view) for view in (*shifted, *map(mirror, shifted))]
    return [(1 / 4, images), (1 / 4, mirror(images)), *moved]


def mirror(images: Any) -> Any:
    """Images [b, height, width, channels], left and right exchanged."""
    return images[:, :, ::-1]
