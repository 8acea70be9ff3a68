"""Buckets: gradients that travel as one message while backward computes the next ones.

`plan` divides gradients into buckets. `order` and `gate` make a graph compute them bucket by bucket. Without them
no message can leave before the end of backward: TensorFlow's executor starts the newest ready operation first, so it
computes the gradients of all activations first and those of the weights afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf


def plan(sizes: Iterable[int], most: int | None) -> list[list[int]]:
    """Indices of tensors by bucket, in the order given. A bucket is closed as soon as it holds `most` bytes.

    Args:
        sizes: bytes of each tensor, in the order in which they become ready.
        most: None: all tensors in one bucket.
    """
    buckets: list[list[int]] = []
    held = 0
    for index, size in enumerate(sizes):
        if not buckets or (most is not None and held >= most):
            buckets.append([])
            held = 0
        buckets[-1].append(index)
        held += size
    return buckets


def order(tensors: Sequence[Any]) -> list[int]:
    """Indices of gradients in the order in which a graph computes them: by the longest chain of operations before each.

    Eager gradients are ready already; the order is then from the last to the first.
    """
    backwards = range(len(tensors) - 1, -1, -1)
    if tf.executing_eagerly():
        return list(backwards)
    before = _Ancestors()
    return sorted(backwards, key=lambda i: before.depth[tensors[i].op.name])


def gate(messages: Sequence[Any]) -> None:
    """Make a graph complete each message before it starts what only later messages need. Eagerly it does nothing.

    Args:
        messages: tensors in the order in which they are to be sent.
    """
    if tf.executing_eagerly():
        return
    before = _Ancestors()
    done = 0
    for message, following in zip(messages, messages[1:], strict=False):
        done |= before.of(message)
        for operation in before.operations(before.of(following) & ~done):
            # The message needs none of these, so no cycle arises. TensorFlow has no public call to order operations.
            operation._add_control_input(message.op)


class _Ancestors:
    """What precedes each operation of the current graph.

    depth: length of the longest chain of operations before it, by name.
    """

    def __init__(self) -> None:
        self._all = tf.compat.v1.get_default_graph().get_operations()
        self._bits: dict[str, int] = {}  # of an operation and all that precede it
        self.depth: dict[str, int] = {}
        number = {operation.name: i for i, operation in enumerate(self._all)}
        waiting = self._all[::-1]
        while waiting:
            operation = waiting[-1]
            before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
            missing = [other for other in before if other.name not in self.depth]
            if missing:  # a control input may be created after its operation
                waiting += missing
                continue
            waiting.pop()
            self._bits[operation.name] = 1 << number[operation.name]
            for other in before:
                self._bits[operation.name] |= self._bits[other.name]
            self.depth[operation.name] = max((self.depth[other.name] + 1 for other in before), default=0)

    def of(self, tensor: Any) -> int:
        """The operations that a tensor needs, as bits."""
        return self._bits[tensor.op.name]

    def operations(self, bits: int) -> list[Any]:
        return [operation for i, operation in enumerate(self._all) if bits >> i & 1]


def flat(tensors: Sequence[Any]) -> Any:
    """The values of tensors of one type, one after the other: [n]."""
    if len(tensors) == 1:
        return tf.reshape(tensors[0], [-1])
    return tf.concat([tf.reshape(t, [-1]) for t in tensors], axis=0)


def pieces(values: Any, like: Sequence[Any]) -> list[Any]:
    """The inverse of `flat`: values [n] in the shapes of `like`."""
    if len(like) == 1:
        return [tf.reshape(values, tf.shape(like[0]))]
    parts = tf.split(values, [tf.size(t) for t in like])
    return [tf.reshape(part, tf.shape(t)) for part, t in zip(parts, like, strict=True)]
