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

from .collectives import all_gather_object, broadcast_bytes


@dataclass(frozen=True)
class Divergence:
    """The first variable that is not the same on all ranks.

    Attributes:
        variable: its path.
        others: number of variables after it that also differ.
        sides: lists of ranks with the same value; the list with the lowest rank comes first.
        values: number of its values that differ between any two sides.
        size: number of its values.
        largest: the largest absolute difference of a value between the first side and another.
    """

    variable: str
    others: int
    sides: list[list[int]]
    values: int
    size: int
    largest: float

    def __str__(self) -> str:
        first, *rest = (f"rank{'s' * (len(side) > 1)} {', '.join(map(str, side))}" for side in self.sides)
        more = f"; {self.others} variable{'s' * (self.others > 1)} after it also" if self.others else ""
        return (
            f"{self.variable} is not the same on {first} as on {' and on '.join(rest)}: {self.values:,} of "
            f"{self.size:,} values, by up to {self.largest:.6g}{more}"
        )


def digests(variables: Sequence[keras.Variable]) -> list[bytes]:
    """SHA-256 of each variable's bits. Local."""
    return [hashlib.sha256(_array(variable).tobytes()).digest() for variable in variables]


def find_divergence(variables: Sequence[keras.Variable]) -> Divergence | None:
    """Compare variables over all ranks. A collective; each rank sends 32 bytes if all are equal.

    Returns:
        The first difference, the same on every rank; None if all bits are equal.
    """
    if hvd.size() == 1:
        return None
    own = digests(variables)
    everything = np.frombuffer(hashlib.sha256(b"".join(own)).digest(), np.uint8)
    if len(np.unique(hvd.allgather(tf.constant(everything)[None, :]).numpy(), axis=0)) == 1:
        return None
    by_rank = all_gather_object(own)
    different = [i for i in range(len(own)) if len({theirs[i] for theirs in by_rank}) > 1]
    variable = variables[different[0]]
    sides: dict[bytes, list[int]] = {}
    for rank, theirs in enumerate(by_rank):
        sides.setdefault(theirs[different[0]], []).append(rank)
    first_side, *other_sides = sides.values()
    first = _from(first_side[0], variable)
    differs = np.zeros(first.shape, bool)
    largest = 0.0
    for side in other_sides:  # one after the other: a variable of every rank may be more than a rank's memory
        other = _from(side[0], variable)
        differs |= _bits(first) != _bits(other)
        with np.errstate(all="ignore"):
            apart = np.abs(first.astype(np.float64) - other.astype(np.float64))
        largest = max(largest, float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0)))
    return Divergence(
        variable=variable.path,
        others=len(different) - 1,
        sides=list(sides.values()),
        values=int(differs.sum()),
        size=int(differs.size),
        largest=largest,
    )


def _from(rank: int, variable: keras.Variable) -> Any:
    """A rank's value of a variable. A collective."""
    own = _array(variable)
    return broadcast_bytes(own.reshape(-1).view(np.uint8), rank).view(own.dtype).reshape(own.shape)


def _array(variable: keras.Variable) -> Any:
    return np.ascontiguousarray(variable.numpy()).reshape(variable.shape)


def _bits(array: Any) -> Any:
    return array.view(f"u{array.dtype.itemsize}")
