"""Names of collectives in graphs: unlike each other, and the same whatever else a process has made."""

from __future__ import annotations

import tensorflow as tf

from hvd_cifar.distributed import names


def _names_of(made_before: int) -> list[str]:
    """The names in a graph of a scope, two branches, and two functions, of which the graph's outermost counts all."""
    found: list[str] = []

    def name(role: str) -> None:
        found.append(names.in_graph("Allreduce", role)["name"])

    def doubled(x: tf.Tensor) -> tf.Tensor:
        name("gradients")
        return 2.0 * x

    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tf.Tensor:
        name("gradients")
        return x + 1

    @tf.function(autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        for _ in range(made_before):
            x = tf.cond(x[0] > 0, lambda x=x: x * 2.0, lambda x=x: x)
        with tf.name_scope("scope"):
            name("gradients")
            name("values")
        for _ in range(2):
            x = tf.cond(x[0] > 0, lambda x=x: doubled(x), lambda x=x: x)
        return inner(x)

    outer(tf.ones(1))
    return found


def test_names_count_collectives_alone_and_differ_within_a_graph() -> None:
    found = _names_of(0)
    assert found == _names_of(3)  # other operations, and another graph before
    assert found == [
        f"HorovodAllreduce_{what}" for what in ("gradients_1", "values_1", "gradients_2", "gradients_3")
    ] + ["HorovodAllreduce_gradients_4"]


def test_an_eager_collective_has_no_name() -> None:
    assert names.in_graph("Broadcast", "variables") == {}
