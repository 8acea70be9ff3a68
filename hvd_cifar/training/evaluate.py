"""Accuracy and loss on a whole set. Every example counts once, so results do not depend on the number of ranks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import evaluation_batches
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.world import World
from hvd_cifar.training.confusion import MOST_CLASSES, Confusion, Tally
from hvd_cifar.training.step import cross_entropy, real_of

MOST_AT_ONCE = 500  # examples: large enough to be fast, and fits any device
# Difference of an image's two largest logits, averaged over two views, from which four more views change hardly any
# answer: none of 30,000 of `fast`, 2 of 10,000 of a resnet20.
SURE = 2.0


@dataclass(frozen=True)
class Evaluation:
    """Results over all examples: accuracy as a fraction, loss as mean cross-entropy without weight decay.

    Attributes:
        views: 6 if accuracy and loss average six views of each uncertain image and two of the others, else 1.
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

    A rank evaluates `batch_size` examples at a time, by default `examples_at_once`. With `six_views` it sees an image
    and its mirror image first, and the other four views only of an image whose two largest logits then differ by less
    than `SURE`. Such images wait until they fill a batch. On another number of ranks rounding may take an image across
    this limit: then its logits change by more than rounding.

    Batch norm's moving statistics must be the same on all ranks: see `TrainState.average`.
    """
    examples = getattr(dataset, part)
    chosen = np.arange(len(examples))
    batch_size = batch_size or examples_at_once(dataset.image_shape, transforms.shape)
    batches = evaluation_batches(
        examples, transforms, batch_size=batch_size, rank=world.rank, size=world.size, chosen=chosen
    )

    def losses_of(label: Any, logits: Any) -> Any:
        return tf.cast(cross_entropy(label, logits), tf.float64)

    @tf.function(reduce_retracing=True, autograph=False)
    def first_look(image: Any, label: Any, mirrored: bool) -> Any:
        plain = logits_of(model, image)
        logits = (plain + logits_of(model, mirror(image))) / 2 if mirrored else plain
        return losses_of(label, logits), logits, plain

    # One graph, also for the last ones, which fill no batch.
    uncertain = [tf.TensorSpec([None, *transforms.shape]), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=[*uncertain, tf.TensorSpec([None, None], real_of(model))], autograph=False)
    def second_look(image: Any, label: Any, logits: Any) -> Any:
        shifted = [logits_of(model, view) for view in shifted_views(image)]
        logits = logits / 2 + sum(shifted) / 8
        return losses_of(label, logits), logits

    def evaluate(many: bool = False) -> Evaluation:
        totals, seen = np.zeros(3), 0
        tally = Tally(dataset.classes) if dataset.classes <= MOST_CLASSES else None

        def add(number: Any, label: Any, losses: Any, logits: Any) -> None:
            if tally:
                tally.add(number, label, losses, logits)
            totals[:2] += losses.sum(), (logits.argmax(axis=-1) == label).sum()

        def look_again(at: _Uncertain) -> None:
            add(at.number, at.label, *(value.numpy() for value in second_look(at.image, at.label, at.logits)))

        waiting: _Uncertain | None = None
        for image, labels in batches:
            losses, logits, plain = (value.numpy() for value in first_look(image, labels, many))
            label = labels.numpy()
            number = chosen[world.rank + world.size * (seen + np.arange(len(label)))]
            seen += len(label)
            totals[2] += (plain.argmax(axis=-1) == label).sum()
            if not many:
                add(number, label, losses, logits)
                continue
            sure = _is_sure(logits)
            add(number[sure], label[sure], losses[sure], logits[sure])
            unsure = _Uncertain(number, image.numpy(), label, logits).part(~sure)
            waiting = waiting.and_also(unsure) if waiting else unsure
            if len(waiting.number) >= batch_size:
                look_again(waiting.part(slice(batch_size)))
                waiting = waiting.part(slice(batch_size, None))
        if waiting and len(waiting.number):
            look_again(waiting)
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


class _Uncertain(NamedTuple):
    """Examples after the first look.

    Attributes:
        number: indices int64 [b] in the data set.
        image, label, logits: [b, height, width, channels], [b] and [b, classes].
    """

    number: Any
    image: Any
    label: Any
    logits: Any

    def part(self, chosen: Any) -> _Uncertain:
        """The examples that a mask [b] or a slice chooses."""
        return _Uncertain(*(value[chosen] for value in self))

    def and_also(self, others: _Uncertain) -> _Uncertain:
        """These examples, and after them the others."""
        return _Uncertain(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))


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

    The image itself, its mirror image, and `shifted_views`.
    """
    shifted = [(1 / 8, view) for view in shifted_views(images)]
    return [(1 / 4, images), (1 / 4, mirror(images)), *shifted]


def shifted_views(images: Any) -> list[Any]:
    """Images [b, height, width, channels] shifted by a pixel down and right, and up and left; their mirror images."""
    height, width = images.shape[1:3]
    padded = keras.ops.pad(images, [[0, 0], [1, 1], [1, 1], [0, 0]], mode="reflect")
    moved = [padded[:, offset : offset + height, offset : offset + width] for offset in (0, 2)]
    return [*moved, *(mirror(image) for image in moved)]


def mirror(images: Any) -> Any:
    """Images [b, height, width, channels], left and right exchanged."""
    return images[:, :, ::-1]


def _is_sure(logits: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
    """Whether the two largest logits of each example [b, classes] differ by `SURE` or more. NaN is not sure."""
    second, first = np.partition(logits, -2)[..., -2:].T
    return np.asarray(first >= second + SURE)  # also where both are infinite
