"""Buckets and the order in which a graph computes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import buckets
from hvd_cifar.distributed.optimizer import DistributedOptimizer
from hvd_cifar.training.work import bucket_bytes_of, for_machines


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
    before = buckets._ancestors(one.graph.get_operations())
    return one.op.name != other.op.name and before[one.op.name] & ~before[other.op.name] == 0


def test_a_message_is_complete_before_what_later_ones_need() -> None:
    graph, weights, activations = _chain()
    with graph.as_default():
        messages = [tf.identity(weights[i]) for i in (2, 1, 0)]
        assert not _precedes(messages[0], activations[0])  # TensorFlow may compute it before or after
        buckets.gate(messages)
        assert _precedes(messages[0], activations[0]) and _precedes(messages[1], activations[1])
        buckets.gate([tf.identity(message) for message in messages])  # a second optimizer in the same graph
        with tf.compat.v1.Session() as session:  # no cycle
            assert len(session.run(activations, {t: [[1.0, 1.0]] * t.shape[0] for t in _inputs(graph)})) == 3


def _inputs(graph: tf.Graph) -> list[Any]:
    return [operation.outputs[0] for operation in graph.get_operations() if operation.type == "Placeholder"]


@pytest.mark.parametrize(
    ("options", "hosts", "expected"),
    [
        ({}, 1, None),
        ({}, 2, 250_000),  # a sixteenth of 4 MB
        ({"compression": "fp16"}, 2, 125_000),
        ({"overlap": "off"}, 2, None),
        ({"bucket_bytes": 1000}, 1, 1000),
        ({"gradient_accumulation": 2}, 2, None),
        ({"precision": "mixed_float16"}, 2, None),
        ({"precision": "mixed_float16", "overlap": "on"}, 2, 250_000),
    ],
)
def test_gradients_leave_in_buckets_between_hosts(options: dict[str, Any], hosts: int, expected: int | None) -> None:
    world: Any = SimpleNamespace(size=2, local_size=2 // hosts, ranks=[SimpleNamespace(precision="float32")])
    settings = for_machines(TrainSettings(**options), world)
    model: Any = SimpleNamespace(trainable_variables=[keras.Variable(np.zeros(10**6, np.float32))])
    work: Any = SimpleNamespace(settings=settings)
    assert bucket_bytes_of(work, model) == expected
    model.trainable_variables[:] = [keras.Variable(np.zeros(10, np.float32))]
    assert bucket_bytes_of(work, model) in (None, 1000, 2**16)
