"""The confusion matrix of a net, and its worst mistakes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives

WORST = 16  # mistakes to keep
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
