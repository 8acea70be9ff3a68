"""How gradients are reduced over the ranks: the settings, and the collectives that they ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from . import buckets, names
from .fixed_order import all_reduce_in_tree


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

    @property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing: it is the only member of the process set, or no member."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether each call returns the uncompressed sum over the ranks."""
        return not self.average and self.compression == "none" and self.passes == 1

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """All-reduce gradients of any floating types over the ranks; in a graph, as its operations. A collective.

        Args:
            gradients: tensors, `tf.IndexedSlices`, or None, which stays None; the same kinds, types and shapes on every
                rank.
            variables: whose they are, which does not matter here.
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

    def sums(self, values: Sequence[Any]) -> list[Any]:
        """Sums of tensors over the ranks, never compressed. A collective."""
        return list(values) if self.is_local else all_reduce(values, hvd.Sum, self)


def pack(gradient: Any, reduction: Reduction, ranks: int) -> Any:
    """A rank's gradient in the type and scale in which it is sent. Local."""
    # Horovod cannot add bfloat16.
    wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
    if reduction.compression != "fp16":
        return wide
    # A share of a global mean shrinks as the number of ranks grows, until it underflows in half precision.
    return tf.cast(wide if reduction.average else wide * ranks, tf.float16)


def sent_width(dtype: Any, compression: str) -> int:
    """Bytes of one value of a gradient as `pack` sends it."""
    if compression == "fp16":
        return 2
    dtype = tf.as_dtype(dtype)
    return 4 if dtype == tf.bfloat16 else int(dtype.size)


def sent_bytes(like: Any, compression: str) -> int:
    """Bytes of a gradient as `pack` sends it. `like`: its variable, or a tensor."""
    return math.prod(like.shape) * sent_width(like.dtype, compression)


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
            (total,) = all_reduce_in_tree([message], reduction.process_set)
        else:
            name = names.in_graph("Allreduce", "gradients")
            total = hvd.allreduce(message, op=op, process_set=reduction.process_set, **name)
        for i, piece in zip(bucket, buckets.pieces(total, [tensors[i] for i in bucket]), strict=True):
            totals[i] = piece
    return totals


def _reduce_sparse(gradient: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """Gather the rows of all ranks and add up those with the same index."""
    process_set, ranks = reduction.process_set, reduction.process_set.size()
    packed = pack(gradient.values, reduction, ranks)
    rows = hvd.allgather(packed, process_set=process_set, **names.in_graph("Allgather", "rows"))
    indices = hvd.allgather(gradient.indices, process_set=process_set, **names.in_graph("Allgather", "indices"))
    dtype = gradient.values.dtype
    wide = unpack(rows, tf.float32 if dtype == tf.bfloat16 else dtype, reduction, ranks)
    summed = with_sums_of_rows(tf.IndexedSlices(wide, indices, gradient.dense_shape))
    return tf.IndexedSlices(tf.cast(summed.values, dtype), summed.indices, summed.dense_shape)


def with_sums_of_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient with one row for each index: Adam and others would square each of several, not their sum. Local."""
    dtype = gradient.values.dtype
    wide = tf.cast(gradient.values, tf.float32) if dtype == tf.bfloat16 else gradient.values
    unique, positions = tf.unique(gradient.indices)
    total = tf.math.unsorted_segment_sum(wide, positions, tf.size(unique))
    return tf.IndexedSlices(tf.cast(total, dtype), unique, gradient.dense_shape)


def checked(op: Any, compression: Any, passes: Any, bucket_bytes: Any, process_set: Any) -> dict[str, Any]:
    """Arguments of `DistributedOptimizer` as fields of a `Reduction`. Raises ValueError where one is out of range."""
    for name, count in (("backward_passes_per_step", passes), ("bucket_bytes", bucket_bytes)):
        fits = isinstance(count, Integral) and not isinstance(count, bool) and int(count) >= 1
        if not fits and (name, count) != ("bucket_bytes", None):
            raise ValueError(f"{name} is {count}: it must be an integer, at least 1")
    if getattr(process_set, "process_set_id", 0) is None:
        raise ValueError("process_set is not registered: give it to hvd.init(process_sets=[...]) on every rank")
    kinds = {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    return {
        "average": _named(op, {"average": hvd.Average, "sum": hvd.Sum}, "op") == hvd.Average,
        "compression": "fp16" if _named(compression, kinds, "compression") is hvd.Compression.fp16 else "none",
        "passes": passes,
        "bucket_bytes": bucket_bytes,
        "process_set": process_set,
    }


def _named(value: Any, known: dict[str, Any], what: str) -> Any:
    if isinstance(value, str) and value in known:
        return known[value]
    if isinstance(value, str) or not any(value is one or value == one for one in known.values()):
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(known)}")
    return value
