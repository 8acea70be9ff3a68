"""How gradients are reduced over the ranks: the settings, and the collectives that they ask for.

MPI and NCCL choose the order of a sum, and so its bits, by the size of the message and the number of ranks. With
`fixed_order` it is a binary tree: M terms give the same bits on 1, 2, 4, ... ranks that hold 2^k neighbours each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeVar

import horovod.tensorflow as hvd
import tensorflow as tf

from . import buckets
from .collectives import in_graph
from .errors import note

T = TypeVar("T")


@dataclass(frozen=True)
class Reduction:
    """How `DistributedOptimizer` reduces gradients; see its arguments."""

    average: bool = True
    compression: str = "none"
    passes: int = 1
    average_passes: bool = False
    process_set: Any = hvd.global_process_set
    sparse_as_dense: bool = False
    fixed_order: bool = False
    bucket_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, count in (("backward_passes_per_step", self.passes), ("bucket_bytes", self.bucket_bytes)):
            fits = isinstance(count, Integral) and not isinstance(count, bool) and int(count) >= 1
            if not fits and (name, count) != ("bucket_bytes", None):
                raise ValueError(f"{name} is {count}: it must be an integer, at least 1")
        if getattr(self.process_set, "process_set_id", 0) is None:
            raise ValueError("process_set is not registered: give it to hvd.init(process_sets=[...]) on every rank")

    @property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing: it is the only member of the process set, or no member."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether each call returns the uncompressed sum over the ranks, of whatever it is given."""
        return type(self) is Reduction and not self.average and self.compression == "none" and self.passes == 1

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """All-reduce gradients of any floating types over the ranks; in a graph, as its operations. A collective.

        They are tensors, `tf.IndexedSlices`, or None, which stays None; the same kinds, types and shapes on every rank.
        """
        if self.sparse_as_dense or self.fixed_order:
            gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        if self.is_local:
            return [with_sums_of_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        reduced = [_reduce_sparse(g, self) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
        ranks = self.process_set.size()
        packed = [pack(tf.convert_to_tensor(gradients[i]), self, ranks) for i in dense]
        by_horovod = self.average and self.compression == "none" and not self.fixed_order
        totals = all_reduce(packed, hvd.Average if by_horovod else hvd.Sum, self)
        for i, total in zip(dense, totals, strict=True):
            dtype = gradients[i].dtype
            reduced[i] = tf.cast(total, dtype) if by_horovod else unpack(total, dtype, self, ranks)
        return reduced


def average_variables(variables: Sequence[Any]) -> None:
    """Replace Keras's variables by their mean over the ranks. A collective."""
    note(f"all-reduce of {len(variables)} variables")
    means = Reduction().reduce([tf.convert_to_tensor(v.value) for v in variables])
    for variable, mean in zip(variables, means, strict=True):
        variable.assign(mean)


def pack(gradient: Any, reduction: Reduction, ranks: int) -> Any:
    """A rank's gradient in the type and scale in which it is sent. Local."""
    # Horovod cannot add bfloat16.
    wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
    if reduction.compression != "fp16":
        return wide
    # A share of a global mean shrinks as the number of ranks grows, until it underflows in half precision.
    return tf.cast(wide if reduction.average else wide * ranks, tf.float16)


def sent_bytes(like: Any, compression: str) -> int:
    """Bytes of a gradient as `pack` sends it. `like`: its variable, or a tensor."""
    dtype = tf.as_dtype(like.dtype)
    width = 2 if compression == "fp16" else 4 if dtype == tf.bfloat16 else dtype.size
    return math.prod(like.shape) * width


def unpack(total: Any, dtype: Any, reduction: Reduction, ranks: int) -> Any:
    """The reduced gradient, of type `dtype`, from the sum of what all ranks packed. Local."""
    wide = tf.cast(total, tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype)
    if reduction.average or reduction.compression == "fp16":  # makes the mean, or undoes the factor of `pack`
        wide = wide / ranks
    return tf.cast(wide, dtype)


def all_reduce(tensors: Sequence[Any], op: Any, reduction: Reduction) -> list[Any]:
    """All-reduce tensors in buckets of one type each. Every rank sends the same buckets in the same order."""
    totals: list[Any] = [None] * len(tensors)
    # Backward computes the last layers' gradients first.
    in_order = range(len(tensors))[:: -1 if reduction.bucket_bytes else 1]
    members: list[list[int]] = []
    for dtype in sorted({t.dtype for t in tensors}, key=lambda dtype: dtype.name):
        chosen = [i for i in in_order if tensors[i].dtype == dtype]
        sizes = [(tensors[i].shape.num_elements() or 0) * dtype.size for i in chosen]
        members += [[chosen[i] for i in bucket] for bucket in buckets.plan(sizes, reduction.bucket_bytes)]
    members.sort(key=lambda bucket: max(map(in_order.index, bucket)))
    messages = [buckets.flat([tensors[i] for i in bucket]) for bucket in members]
    if reduction.bucket_bytes:
        buckets.gate(messages)
    for bucket, message in zip(members, messages, strict=True):
        if reduction.fixed_order:
            total = all_reduce_in_tree(message, reduction.process_set)
        else:
            name = in_graph("Allreduce", "gradients")
            total = hvd.allreduce(message, op=op, process_set=reduction.process_set, **name)
        for i, piece in zip(bucket, buckets.pieces(total, [tensors[i] for i in bucket]), strict=True):
            totals[i] = piece
    return totals


def _reduce_sparse(gradient: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """Gather the rows of all ranks and add up those with the same index."""
    process_set, ranks, dtype = reduction.process_set, reduction.process_set.size(), gradient.values.dtype
    packed = pack(gradient.values, reduction, ranks)
    rows = hvd.allgather(packed, process_set=process_set, **in_graph("Allgather", "rows"))
    indices = hvd.allgather(gradient.indices, process_set=process_set, **in_graph("Allgather", "indices"))
    wide = unpack(rows, tf.float32 if dtype == tf.bfloat16 else dtype, reduction, ranks)
    return with_sums_of_rows(tf.IndexedSlices(wide, indices, gradient.dense_shape), dtype)


def with_sums_of_rows(gradient: tf.IndexedSlices, dtype: Any = None) -> tf.IndexedSlices:
    """The gradient with one row for each index: Adam and others would square each of several, not their sum. Local."""
    values, dtype = gradient.values, dtype or gradient.values.dtype
    wide = tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values
    unique, positions = tf.unique(gradient.indices)
    total = tf.math.unsorted_segment_sum(wide, positions, tf.size(unique))
    return tf.IndexedSlices(tf.cast(total, dtype), unique, gradient.dense_shape)


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


def all_reduce_in_tree(message: Any, process_set: Any = hvd.global_process_set) -> Any:
    """The sum of a message over the ranks, added in the order of the ranks by `add_in_tree`. A collective.

    By all-to-all each rank receives all terms of its part of the message; it adds them, and sends the sums to all
    ranks. Each rank sends 2 (N - 1) / N of the message, as in a ring all-reduce. The message is [n], not in bfloat16.
    """
    size, length = process_set.size(), tf.size(message)
    padded = tf.pad(message, [[0, -length % size]])
    terms = hvd.alltoall(padded, process_set=process_set, **in_graph("Allgather", "exchange"))
    sums = _add_rows_in_tree(tf.reshape(terms, [size, -1]))
    return hvd.allgather(sums, process_set=process_set, **in_graph("Allgather", "sums"))[:length]


def _add_rows_in_tree(rows: Any) -> Any:
    """The sum of [n, m] over n in the order of `add_in_tree`, one level of the tree at a time: [m].

    TensorFlow's graph optimizer would turn additions of single rows into one sum from left to right.
    """
    while (count := rows.shape[0]) > 1:
        pairs = rows[0 : count - 1 : 2] + rows[1::2]
        rows = tf.concat([pairs, rows[-1:]], axis=0) if count % 2 else pairs
    return rows[0]


def name_of(what: str, value: Any, known: dict[str, Any]) -> str:
    """The name of an argument's value, which is given as its name or as Horovod's. Raises ValueError for others."""
    for name, of_horovod in known.items():
        if value in (name, of_horovod):
            return name
    raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(known)}")
