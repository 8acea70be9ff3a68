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

from hvd_cifar.distributed import buckets

T = TypeVar("T")

FEW_VALUES = 4096  # up to this number the latency of a collective outweighs the transfer


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


def hosts_alike(local_ranks: Sequence[int]) -> int:
    """The number of hosts, if each has the same number of ranks, which are neighbours; else 1.

    Args:
        local_ranks: of all ranks, in their order.
    """
    hosts = max(local_ranks.count(0), 1)
    return hosts if list(local_ranks) == [*range(len(local_ranks) // hosts)] * hosts else 1


def all_reduce_in_tree(
    values: Sequence[Any],
    process_set: Any = hvd.global_process_set,
    gather: bool | None = None,
    hosts: int = 1,
) -> list[Any]:
    """Sums of tensors over the ranks, added in the order of the ranks by `add_in_tree`. A collective.

    Two algorithms give the same bits. With all-to-all and all-gather, each rank receives all terms of its part of the
    values, adds them, and sends the sums to all ranks: each rank sends 2 (N - 1) / N of the values, as in a ring
    all-reduce. With one all-gather, every rank receives all terms of all values and adds them itself: it sends N - 1
    times the values, but in one collective instead of two, which is faster for short messages.

    bfloat16 is added in float32, and the sum is rounded to bfloat16.

    With several `hosts` the first algorithm is by all-to-alls alone. With several ranks on each it has two levels: a
    host's terms are added before they leave it, and each of H hosts sends 2 (H - 1) / H of the values. Its sums have an
    order of their own, and bfloat16 is also rounded after the first level.

    Args:
        values: tensors of one floating type; the same shapes on every rank.
        gather: True for the one all-gather; None: where there are at most `FEW_VALUES` values.
        hosts: as from `hosts_alike`; 1: one level.
    """
    size = process_set.size()
    dtype = values[0].dtype
    flat = bits_of(buckets.flat(values))
    if gather is None:
        gather = flat.shape[0] is not None and flat.shape[0] <= FEW_VALUES
    if gather:
        terms = hvd.allgather(flat[None, :], name=_name("gather", process_set), process_set=process_set)
        sums = _sum_of_rows(from_bits(tf.ensure_shape(terms, [size, None]), dtype))
    else:
        length = tf.size(flat)
        padded = tf.pad(flat, [[0, -length % size]])
        if hosts > 1:
            sums = _sums_in_levels(padded, dtype, hosts, process_set)
        else:
            terms = hvd.alltoall(padded, name=_name("exchange", process_set), process_set=process_set)
            sums = bits_of(_sum_of_rows(from_bits(tf.reshape(terms, [size, -1]), dtype)))
            sums = hvd.allgather(sums, name=_name("gather", process_set), process_set=process_set)
        sums = from_bits(sums[:length], dtype)
    return buckets.pieces(sums, values)


def _sums_in_levels(values: Any, dtype: Any, hosts: int, process_set: Any) -> Any:
    """Reduce-scatter within hosts and between them, then all-gather between hosts and within them.

    Ranks of one host, and ranks with one local rank, exchange by an all-to-all that has nothing for all others. Between
    hosts Horovod's all-to-all sleeps while it waits, and its all-gather polls.

    Args:
        values: as from `bits_of`, a multiple of the ranks' number. All results are of this kind.
    """
    size = process_set.size()
    local = size // hosts
    host, own = divmod(process_set.rank(), local)
    inside, across = ([r // local == host for r in range(size)], [r % local == own for r in range(size)])

    def exchange(parts: Any, members: list[bool]) -> Any:
        """Send each member its one of equal parts; [members, n]: what they send to this rank."""
        count = sum(members)
        splits = tf.cast(members, tf.int32) * (tf.size(parts) // count)
        received, _ = hvd.alltoall(parts, splits, name=_name("exchange", process_set), process_set=process_set)
        return tf.reshape(received, [count, -1])

    levels = [members for members in (inside, across) if sum(members) > 1]
    for members in levels:
        values = bits_of(_sum_of_rows(from_bits(exchange(values, members), dtype)))
    for members in reversed(levels):
        values = tf.reshape(exchange(tf.tile(values, [sum(members)]), members), [-1])
    return values


def _name(kind: str, process_set: Any) -> str | None:
    """By the number of these collectives in a graph: Horovod's counts slices, of which other kernels make others.

    The beginning is one by which `hvd.elastic.run` knows Horovod's errors; it does not know HorovodAlltoall.
    """
    if tf.executing_eagerly():
        return None
    own = f"_in_order_{process_set.process_set_id}_"
    operations = tf.compat.v1.get_default_graph().get_operations()
    return f"HorovodAllgather_{kind}{own}{sum(own in operation.name for operation in operations)}"


def bits_of(values: Any) -> Any:
    """What Horovod can move: the bits of bfloat16 as float16, any other values as they are. Local."""
    return tf.bitcast(values, tf.float16) if values.dtype == tf.bfloat16 else values


def from_bits(moved: Any, dtype: Any) -> Any:
    """The inverse of `bits_of`: values of type `dtype`. Local."""
    return tf.bitcast(moved, tf.bfloat16) if dtype == tf.bfloat16 else moved


def _sum_of_rows(rows: Any) -> Any:
    """`_add_rows_in_tree` of rows of any type, in its type."""
    wide = tf.cast(rows, tf.float32) if rows.dtype == tf.bfloat16 else rows
    return tf.cast(_add_rows_in_tree(wide), rows.dtype)


def _add_rows_in_tree(rows: Any) -> Any:
    """The sum of [n, m] over n in the order of `add_in_tree`, one level of the tree at a time: [m].

    TensorFlow's graph optimizer would turn additions of single rows into one sum from left to right.
    """
    while (count := rows.shape[0]) > 1:
        pairs = rows[0 : count - 1 : 2] + rows[1::2]
        rows = tf.concat([pairs, rows[-1:]], axis=0) if count % 2 else pairs
    return rows[0]
