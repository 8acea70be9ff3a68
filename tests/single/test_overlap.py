"""Buckets, the order in which a graph computes them, and the choice of their size."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.distributed import buckets
from hvd_cifar.distributed.optimizer import DistributedOptimizer
from hvd_cifar.distributed.overlap import Backward, Link, choose, end_of_messages, seconds_with


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([], 10, []),
        ([5, 5, 5], None, [[0, 1, 2]]),
        ([5, 5, 5], 10, [[0, 1], [2]]),
        ([5, 4, 5], 10, [[0, 1, 2]]),
        ([100, 1, 1], 10, [[0], [1, 2]]),
        ([1, 100, 1], 1, [[0], [1], [2]]),
    ],
)
def test_a_bucket_closes_when_it_is_full(sizes: list[int], most: int | None, expected: list[list[int]]) -> None:
    assert buckets.plan(sizes, most) == expected


@pytest.mark.parametrize("name", ["bucket_bytes", "backward_passes_per_step"])
@pytest.mark.parametrize("value", [0, -5, 1.5, True, np.int64(-1), "4", np.int64(4), 4])
def test_counts_of_the_optimizer(name: str, value: Any) -> None:
    is_right = type(value) in (int, np.int64) and value > 0
    # What is right passes these checks, and Horovod is not initialised here.
    wanted = (RuntimeError, "not initialised") if is_right else (ValueError, f"{name} is .*: it must be an integer")
    with pytest.raises(wanted[0], match=wanted[1]):
        DistributedOptimizer(keras.optimizers.SGD(0.1), **{name: value})


def test_values_survive_their_message() -> None:
    tensors = [tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant(5.0), tf.zeros([0]), tf.constant([6.0])]
    message = buckets.flat(tensors)
    assert message.numpy().tolist() == [1, 2, 3, 4, 5, 6]
    for piece, tensor in zip(buckets.pieces(message, tensors), tensors, strict=True):
        assert piece.numpy().tolist() == tensor.numpy().tolist() and piece.shape == tensor.shape


def _chain() -> tuple[tf.Graph, list[Any], list[Any]]:
    """The gradients of three layers' weights, in the layers' order, and of their activations, last first."""
    graph = tf.Graph()
    with graph.as_default():
        weights = [tf.compat.v1.placeholder(tf.float32, [2, 2]) for _ in range(3)]
        values = [tf.compat.v1.placeholder(tf.float32, [1, 2])]
        for weight in weights:
            values.append(tf.matmul(values[-1], weight))
        gradients = tf.gradients(tf.reduce_sum(values[-1]), [*weights, *values[:3]])
    return graph, gradients[:3], gradients[:2:-1]


def _precedes(one: Any, other: Any) -> bool:
    """Whether an operation runs before another."""
    waiting, seen = [other.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            waiting += [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
    return one.op.name in seen and one.op.name != other.op.name


def test_the_last_layer_s_gradient_is_computed_and_sent_first() -> None:
    graph, weights, activations = _chain()
    with graph.as_default():
        assert buckets.order(weights) == [2, 1, 0]
        messages = [tf.identity(weights[i]) for i in (2, 1, 0)]
        assert not _precedes(messages[0], activations[0])  # TensorFlow may compute it before or after
        buckets.gate(messages)
        assert _precedes(messages[0], activations[0]) and _precedes(messages[1], activations[1])
        buckets.gate([tf.identity(message) for message in messages])  # a second optimizer in the same graph
        with tf.compat.v1.Session() as session:  # no cycle
            assert len(session.run(activations, {t: [[1.0, 1.0]] * t.shape[0] for t in _inputs(graph)})) == 3


def _inputs(graph: tf.Graph) -> list[Any]:
    return [operation.outputs[0] for operation in graph.get_operations() if operation.type == "Placeholder"]


def test_messages_travel_as_horovod_sends_them() -> None:
    ready, sizes = [1.0, 1.5, 2.0, 10.0], [10, 10, 10, 10]
    # Each takes 0.8 s. The third gets ready while the second travels; the last one waits for nobody.
    assert end_of_messages(ready, sizes, lambda size: 0.6 + 0.02 * size) == pytest.approx(10.8)
    assert end_of_messages(ready[:3], sizes[:3], lambda size: 0.6 + 0.02 * size) == pytest.approx(1 + 0.8 + 0.8 + 0.8)
    assert end_of_messages(ready[:3], sizes[:3], float) == pytest.approx(1 + 10 + 20)


BACKWARD = Backward(1.0, (1.0, 2.0, 3.0, 4.0), (100, 100, 100, 100))


@pytest.mark.parametrize(
    ("link", "bucket", "expected"),
    [
        (Link(0.1, 0.005), None, 5 + 0.1 + 2.0),
        (Link(0.1, 0.005), 100, 5 + 0.1 + 0.5),  # all but the last bucket are hidden
        (Link(0.1, 0.005), 200, 5 + 0.1 + 1.0),
        (Link(0.0, 0.02), 100, 1 + 1 + 4 * 2.0),  # longer than backward: from the first gradient on
        (Link(0.0, 0.005, 0.0, 0.005), 100, 5 + 2.0 + 0.5),  # the core's own work cannot be hidden
        (Link(0.1, 0.005, 0.05, 0.002), 100, 5 + 4 * 0.05 + 400 * 0.002 + 0.1 + 0.5),  # a part of it can
    ],
)
def test_the_time_of_a_step_in_buckets(link: Link, bucket: int | None, expected: float) -> None:
    assert seconds_with(BACKWARD, link, bucket) == pytest.approx(expected)


def test_buckets_are_chosen_where_they_save_time() -> None:
    found = choose(BACKWARD, Link(0.01, 0.005), (100, 200, 400))
    assert found.bucket_bytes == 100 and found.in_one_message == pytest.approx(7.01)
    assert choose(BACKWARD, Link(1.0, 0.001, 1.0, 0.001), (100, 200)).bucket_bytes is None  # a message costs too much
    assert choose(BACKWARD, Link(0.0, 0.005, 0.0, 0.005), (400,)).bucket_bytes is None  # nothing can be hidden
    assert choose(BACKWARD, Link(0.0, 0.005, 0.0, 0.005), (400,), always=True).bucket_bytes == 400
    assert choose(BACKWARD, Link(0.0, 0.0), (100, 200)).bucket_bytes is None
