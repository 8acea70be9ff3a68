"""Buckets: gradients that travel as one message while backward computes the next ones.

`plan` divides gradients into buckets. `gate` makes a graph compute them bucket by bucket. Without it no message can
leave before the end of backward: TensorFlow's executor starts the newest ready operation first, so it computes the
gradients of all activations first and those of the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter
from typing import Any

import tensorflow as tf


def plan(sizes: Iterable[int], most: int | None) -> list[list[int]]:
    """Indices of tensors of these bytes, by bucket: one is closed as soon as it holds `most` bytes (None: never)."""
    buckets: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not buckets or (most is not None and held >= most):
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return buckets


def gate(messages: Sequence[Any]) -> None:
    """Make a graph complete each message, in this order, before it starts what only later ones need."""
    if tf.executing_eagerly():
        return
    operations = tf.compat.v1.get_default_graph().get_operations()
    before = _ancestors(operations)
    done = 0
    for message, following in zip(messages, messages[1:], strict=False):
        done |= before[message.op.name]
        later = before[following.op.name] & ~done
        for i, operation in enumerate(operations):
            if later >> i & 1:
                # The message needs none of these: no cycle. TensorFlow has no public call to order operations.
                operation._add_control_input(message.op)


def _ancestors(operations: Sequence[Any]) -> dict[str, int]:
    """Each operation and all that precede it, by name: bit i is set for operation i."""
    before = {o.name: [t.op.name for t in o.inputs] + [other.name for other in o.control_inputs] for o in operations}
    found = {operation.name: 1 << i for i, operation in enumerate(operations)}
    for name in TopologicalSorter(before).static_order():
        for other in before[name]:
            found[name] |= found[other]
    return found


def flat(tensors: Sequence[Any]) -> Any:
    """The values of tensors of one type, one after the other: [n]."""
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def pieces(values: Any, like: Sequence[Any]) -> list[Any]:
    """The inverse of `flat`: values [n] in the shapes of `like`."""
    parts = tf.split(values, [tf.size(t) for t in like])
    return [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, like, strict=True)]
