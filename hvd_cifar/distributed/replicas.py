"""Comparison of the ranks' variables, bit for bit: which one differs, on which ranks, and by how much."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from .collectives import all_gather_object


@dataclass(frozen=True)
class Divergence:
    """The first variable that is not the same on all ranks.

    Attributes:
        variable: its path.
        others: number of variables after it that also differ.
        sides: lists of ranks with the same value; the list with the lowest rank comes first.
        largest: the largest absolute difference of a value between the first side and the second.
    """

    variable: str
    others: int
    sides: list[list[int]]
    largest: float

    def __str__(self) -> str:
        first, *rest = (f"rank{'s' * (len(side) > 1)} {', '.join(map(str, side))}" for side in self.sides)
        more = f"; {self.others} variable{'s' * (self.others > 1)} after it also" if self.others else ""
        return f"{self.variable} is not the same on {first} as on {' and on '.join(rest)}, by {self.largest:.6g}{more}"


def find_divergence(variables: Sequence[keras.Variable]) -> Divergence | None:
    """Compare variables over all ranks. A collective; each rank sends 32 bytes if all are equal.

    Returns:
        The first difference, the same on every rank; None if all bits are equal.
    """
    if hvd.size() == 1:
        return None
    own = [hashlib.sha256(v.numpy().tobytes()).digest() for v in variables]
    everything = np.frombuffer(hashlib.sha256(b"".join(own)).digest(), np.uint8)
    if len(np.unique(hvd.allgather(tf.constant(everything)[None, :]).numpy(), axis=0)) == 1:
        return None
    by_rank = all_gather_object(own)
    different = [i for i in range(len(own)) if len({theirs[i] for theirs in by_rank}) > 1]
    variable = variables[different[0]]
    sides: dict[bytes, list[int]] = {}
    for rank, theirs in enumerate(by_rank):
        sides.setdefault(theirs[different[0]], []).append(rank)
    one, other = (rank for rank, *_ in list(sides.values())[:2])
    values: list[Any] = all_gather_object(variable.numpy() if hvd.rank() in (one, other) else None)
    with np.errstate(all="ignore"):
        apart = np.abs(values[one].astype(np.float64) - values[other].astype(np.float64))
    largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
    return Divergence(variable.path, len(different) - 1, list(sides.values()), largest)
