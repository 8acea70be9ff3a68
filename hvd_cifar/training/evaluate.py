"""Accuracy and loss on a whole set, every example once, at any number of ranks with the same answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.data.augment import Views
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.pipeline import evaluation_batches
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.world import World
from hvd_cifar.training.step import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """Results over all examples: accuracy as a fraction, loss as mean cross-entropy without weight decay.

    Both are of six views of each image where `views` is 6; `plain_accuracy` is of the image as it is.
    """

    accuracy: float
    loss: float
    examples: int
    plain_accuracy: float
    views: int


def make_evaluator(
    model: keras.Model, examples: Examples, views: Views, world: World, batch_size: int, count: int | None = None
) -> Callable[[bool], Evaluation]:
    """A function (six_views) that evaluates the model as it then is, on the first `count` examples; a collective.

    Batch norm's moving statistics must be the same on all ranks: see `step.moving_statistics`.
    """
    batches = evaluation_batches(examples, views, batch_size=batch_size, rank=world.rank, size=world.size, count=count)

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
        for image, label in batches:
            totals += [*sums(image, label, many).numpy(), len(label)]
        # Horovod: sums and counts over the ranks, never means of means.
        entropy, right, plain, seen = collectives.all_reduce_sums(totals.tolist())
        return Evaluation(right / seen, entropy / seen, round(seen), plain / seen, 6 if many else 1)

    return evaluate


def six_views(images: Any) -> list[tuple[float, Any]]:
    """Test images [b, side, side, 3] and their weights in an average: as they are, moved by a pixel up and left, and
    down and right, and all of these mirrored (Jordan 2024, section 3.5)."""
    side = images.shape[1]
    padded = tf.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="REFLECT")
    moved = [padded[:, offset : offset + side, offset : offset + side] for offset in (0, 2)]
    weighted = [(0.25, images), *((0.125, image) for image in moved)]
    return [*weighted, *((weight, image[:, :, ::-1]) for weight, image in weighted)]
