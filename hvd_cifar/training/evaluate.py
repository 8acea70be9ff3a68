"""Accuracy and loss on a whole set: every example once, and the same results on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.pipeline import evaluation_batches
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.world import World
from hvd_cifar.training.sources import read_batches
from hvd_cifar.training.step import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """Results over all examples: accuracy as a fraction, loss as mean cross-entropy without weight decay.

    Attributes:
        views: 6 if accuracy and loss average six views of each image, else 1.
        plain_accuracy: of one view, the image as it is.
        step: finished global steps of the weights.
        part: of the data set: "test", or "validation" for the training examples that are held out.
    """

    accuracy: float
    loss: float
    examples: int
    plain_accuracy: float
    views: int
    step: int = 0
    part: str = "test"

    @property
    def values(self) -> dict[str, float]:
        """What is reported of it, by name."""
        return {"accuracy": self.accuracy, "loss": self.loss, "examples": self.examples}


def make_evaluator(
    model: keras.Model,
    examples: Examples,
    transforms: Transforms,
    world: World,
    batch_size: int,
    count: int | None = None,
) -> Callable[[bool], Evaluation]:
    """A function (six_views) that evaluates the model on the first `count` examples; a collective.

    Batch norm's moving statistics must be the same on all ranks: see `callbacks.MovingStatistics`.
    """
    batches = evaluation_batches(
        examples, transforms, batch_size=batch_size, rank=world.rank, size=world.size, count=count
    )

    def correct(label: Any, logits: Any) -> Any:
        return tf.reduce_sum(tf.cast(tf.equal(tf.argmax(logits, axis=-1, output_type=label.dtype), label), tf.float64))

    @tf.function(reduce_retracing=True, autograph=False)
    def sums(image: Any, label: Any, many: bool) -> Any:
        weighted = six_views(image) if many else [(1.0, image)]
        found = [(weight, model(view, training=False)) for weight, view in weighted]
        exact = tf.float64 if model.compute_dtype == "float64" else tf.float32
        logits = tf.add_n([weight * tf.cast(answer, exact) for weight, answer in found])
        entropy = tf.reduce_sum(tf.cast(cross_entropy(label, logits), tf.float64))
        return tf.stack([entropy, correct(label, logits), correct(label, found[0][1])])

    def evaluate(many: bool = False) -> Evaluation:
        totals = np.zeros(4)
        for image, label in read_batches(batches, world):
            totals += [*sums(image, label, many).numpy(), len(label)]
        # Horovod: sums and counts over the ranks, never means of means.
        entropy, right, plain, seen = collectives.all_reduce_sums(totals.tolist())
        return Evaluation(right / seen, entropy / seen, round(seen), plain / seen, 6 if many else 1)

    return evaluate


def six_views(images: Any) -> list[tuple[float, Any]]:
    """Views of test images [b, height, width, channels], and their weights in an average (Jordan 2024, section 3.5).

    The image itself, shifted by a pixel down and right, and up and left; and the mirror images of all three.
    """
    height, width = images.shape[1:3]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")
    moved = [padded[:, offset : offset + height, offset : offset + width] for offset in (0, 2)]
    weighted = [(0.25, images), *((0.125, image) for image in moved)]
    return [*weighted, *((weight, image[:, :, ::-1]) for weight, image in weighted)]
