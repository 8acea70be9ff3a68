"""PowerSGD (Vogels, Karimireddy, Jaggi 2019): gradients travel as two thin matrices, and what these miss is kept.

A gradient of two or more dimensions is a matrix [n, m]: a convolution's kernel [h, w, in, out] is [h * w * in, out].
Of the sum M over the ranks, one step of subspace iteration finds an orthonormal basis P [n, R] and Q = M^T P [m, R].
P Q^T is applied. Each rank adds what is missing to its next gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

AllReduce = Callable[[Sequence[Any]], list[Any]]


@dataclass(frozen=True)
class Memory:
    """What the compression of one variable's gradient keeps from step to step.

    Attributes:
        error: [n, m], each rank's own, in units of the reduced gradient. Only its mean over the ranks matters, and
            the mean does not depend on the number of ranks.
        right: Q of the last step [m, R], the same on all ranks.
    """

    error: keras.Variable
    right: keras.Variable


def make_memory(variables: Sequence[Any], rank: int) -> list[Memory | None]:
    """The memory of each variable, or None where the two thin matrices are no smaller than its gradient."""
    return [_memory(variable, rank, index) for index, variable in enumerate(variables)]


def matrix_of(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """The matrix [n, m] of a gradient; None where the two thin matrices are no smaller than it."""
    if len(shape) < 2:
        return None
    n, m = math.prod(shape[:-1]), shape[-1]
    return (n, m) if rank * (n + m) < n * m else None


def _memory(variable: Any, rank: int, index: int) -> Memory | None:
    matrix = matrix_of(variable.shape, rank)
    if matrix is None:
        return None
    n, m = matrix
    dtype = "float64" if variable.dtype == "float64" else "float32"
    drawn = np.random.default_rng(index).normal(size=(m, rank))  # the same on every rank

    def right(shape: Any, dtype: Any) -> Any:
        return tf.constant(drawn, dtype)

    def of(initializer: Any, shape: tuple[int, int], name: str) -> keras.Variable:
        return keras.Variable(initializer=initializer, shape=shape, dtype=dtype, trainable=False, name=name)

    return Memory(of("zeros", (n, m), f"error_{index}"), of(right, (m, rank), f"right_{index}"))


def reduce(
    gradients: Sequence[Any], memory: Sequence[Memory | None], all_reduces: tuple[AllReduce, AllReduce], ranks: int
) -> list[Any]:
    """Gradients reduced over the ranks, those with a memory by their thin matrices. A collective.

    Args:
        gradients: tensors, `tf.IndexedSlices`, or None. Sparse gradients travel as they are.
        memory: of each gradient, or None where it is to travel as it is.
        all_reduces: sums or means of such gradients over the ranks. The first takes all P and the gradients without a
            memory, the second all Q.
        ranks: what the result is divided by to give a rank's share: their number for sums, 1 for means.
    """
    pairs = enumerate(zip(gradients, memory, strict=True))
    kept = {i: k for i, (g, k) in pairs if k is not None and g is not None and not isinstance(g, tf.IndexedSlices)}
    matrices = {
        i: tf.cast(tf.reshape(gradients[i], k.error.shape), k.error.dtype) + k.error.value / ranks
        for i, k in kept.items()
    }
    sent = [tf.matmul(matrices[i], kept[i].right.value) if i in kept else g for i, g in enumerate(gradients)]
    reduced = all_reduces[0](sent)
    # Householder's reflections make a basis of any matrix, also of zeros: a gradient that is zero once is not lost.
    bases = {i: _basis(reduced[i]) for i in kept}
    rights = all_reduces[1]([tf.matmul(matrices[i], basis, transpose_a=True) for i, basis in bases.items()])
    for (i, k), right in zip(kept.items(), rights, strict=True):
        result = tf.matmul(bases[i], right, transpose_b=True)
        k.error.assign(matrices[i] * ranks - result)
        k.right.assign(right)
        reduced[i] = tf.cast(tf.reshape(result, tf.shape(gradients[i])), gradients[i].dtype)
    return reduced


def _basis(matrix: Any) -> Any:
    """An orthonormal basis of a matrix's columns. At full rank its signs do not depend on rounding: ranks agree."""
    basis, triangle = tf.linalg.qr(matrix)
    return tf.where(tf.linalg.diag_part(triangle) < 0, -basis, basis)
