"""Sums in one fixed order: a binary tree over neighbours, whatever the number of ranks that hold the terms.

Floating-point addition is not associative: (a + b) + c and a + (b + c) differ in the last bit. MPI and NCCL choose the
order of an all-reduce by the size of the message and the number of ranks. Here the definition fixes the order: M terms
give the same bits on 1, 2, 4, ... ranks if each rank holds 2^k neighbouring terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from . import buckets, names

T = TypeVar("T")


def add_in_tree(terms: Iterable[T], add: Callable[[T, T], T]) -> T:
    """((t0 + t1) + (t2 + t3)) + ...; takes terms one by one and keeps at most log2 of their number. Local."""
    waiting: list[tuple[int, T]] = []  # sums of 2^height neighbours each, highest first
    for term in terms:
        total, height = term, 0
        while waiting and waiting[-1][0] == height:
            total, height = add(waiting.pop()[1], total), height + 1
        waiting.append((height, total))
    total = waiting.pop()[1]
    while waiting:
        total = add(waiting.pop()[1], total)
    return total


def all_reduce_in_tree(values: Sequence[Any], process_set: Any = hvd.global_process_set) -> list[Any]:
    """Sums of tensors over the ranks, added in the order of the ranks by `add_in_tree`. A collective.

    By all-to-all each rank receives all terms of its part of the values; it adds them, and sends the sums to all ranks.
    Each rank sends 2 (N - 1) / N of the values, as in a ring all-reduce.

    Args:
        values: tensors of one floating type, not bfloat16; the same shapes on every rank.
    """
    size = process_set.size()
    flat = buckets.flat(values)
    length = tf.size(flat)
    padded = tf.pad(flat, [[0, -length % size]])
    terms = hvd.alltoall(padded, process_set=process_set, **names.in_graph("Allgather", "exchange"))
    sums = _add_rows_in_tree(tf.reshape(terms, [size, -1]))
    sums = hvd.allgather(sums, process_set=process_set, **names.in_graph("Allgather", "sums"))[:length]
    return buckets.pieces(sums, values)


def _add_rows_in_tree(rows: Any) -> Any:
    """The sum of [n, m] over n in the order of `add_in_tree`, one level of the tree at a time: [m].

    TensorFlow's graph optimizer would turn additions of single rows into one sum from left to right.
    """
    while (count := rows.shape[0]) > 1:
        pairs = rows[0 : count - 1 : 2] + rows[1::2]
        rows = tf.concat([pairs, rows[-1:]], axis=0) if count % 2 else pairs
    return rows[0]
