"""The start-up proof: small real updates on the path of training show that gradients reach all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.fixed_order import FEW_VALUES
from hvd_cifar.distributed.optimizer import apply_and_sum, reduction_of
from hvd_cifar.errors import TrainingError

# Half precision rounds to 11 bits; without the average a value is off by at least 1 part in 5.
TOLERANCE = 2e-3


def prove_averaging(
    wrap: Callable[[keras.optimizers.Optimizer], Any], contributions: Literal["average", "sum"] = "average"
) -> str:
    """Check by real updates that `wrap` makes an optimizer which averages gradients over all ranks. A collective.

    The updates take the path of training: the loss goes through `scale_loss`, gradients and values through
    `apply_and_sum`, in a `tf.function`. One update is a single graph, like a step of one micro-batch; its message is
    long enough for the all-to-all of the fixed order. In the other update gradients are inputs of a second graph, as
    after several micro-batches, and the message is short. Ranks feed small integers, whose sums over up to 1,024 ranks
    are exact in half precision. Every rank checks the results of all ranks.

    Args:
        wrap: turns a plain optimizer into the run's, with its reduction, its compression and its loss scale.
        contributions: "average" if each rank feeds the gradient of its own mean, "sum" if it feeds its share of the
            global mean; the result must be the same.

    Returns:
        What was proven, in words.

    Raises:
        TrainingError: on every rank, if on any rank the weights are not those of the average gradient, or the values
            beside the gradients are not the sums; it names ranks and numbers.
    """
    rank, size = hvd.rank(), hvd.size()
    by_rank = np.array([(1 + r % 3, -1 - r % 2) for r in range(size)], np.float64)
    values_by_rank = 3.0 * by_rank
    for length, in_one_graph in ((FEW_VALUES + 1, True), (1, False)):
        mine = by_rank[rank] / (size if contributions == "sum" else 1)
        weights, sums, updates = _update(wrap, np.tile(mine[:, None], length), values_by_rank[rank], in_one_graph)
        shares = by_rank * updates / (size if contributions == "sum" else 1)
        expected = -shares.sum(axis=0) / (1 if contributions == "sum" else size)
        worst = np.abs(weights - expected[:, None]).argmax(axis=1)
        _compare(
            (weights[[0, 1], worst], expected, "gradients are not averaged over the ranks"),
            (sums, values_by_rank.sum(axis=0), "values beside the gradients are not summed over the ranks"),
        )
    if size == 1:
        return "one rank applies its own gradients"
    return f"gradients that differ by rank became {_show(by_rank.mean(axis=0))}, their average, on all {size} ranks"


def _update(
    wrap: Callable[[keras.optimizers.Optimizer], Any], gradient: NDArray[Any], values: NDArray[Any], in_one_graph: bool
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """A variable [2, n] after SGD of rate 1 from 0, the sums of values [2], and the number of gradients."""
    real = keras.config.floatx()
    optimizer = wrap(keras.optimizers.SGD(1.0))
    reduction = reduction_of(optimizer)
    variable = keras.Variable(np.zeros(gradient.shape), dtype=real, name="start_up_proof")
    optimizer.build([variable])

    def gradient_of(slope: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = optimizer.scale_loss(tf.reduce_sum(variable.value * slope))
        return tape.gradient(loss, variable.value)

    def apply(found: Any, value: Any) -> Any:
        if reduction is None:  # another optimizer: its gradients fail the proof unless it reduces them
            optimizer.apply([found], [variable])
            return tf.split(collectives.all_reduce_in_graph(value), 2)
        return apply_and_sum(optimizer, [found], [variable], tf.split(value, 2))

    if in_one_graph:
        step = tf.function(lambda slope, value: apply(gradient_of(slope), value), autograph=False)
    else:
        one, other = tf.function(gradient_of, autograph=False), tf.function(apply, autograph=False)

        def step(slope: Any, value: Any) -> Any:
            return other(one(slope), value)

    passes = reduction.passes if reduction else 1
    for _ in range(passes):
        sums = step(tf.constant(gradient, real), tf.constant(values, real))
    updates = passes if reduction and not reduction.average_passes else 1
    return np.asarray(variable.numpy(), np.float64), np.concatenate(sums).astype(np.float64), updates


def _compare(*results: tuple[NDArray[Any], NDArray[Any], str]) -> None:
    """Raise on every rank if any rank's numbers are not the expected ones. A collective.

    Args:
        results: pairs of this rank's numbers [2] and the expected ones [2], each with what is wrong if they differ.
    """
    mine = np.concatenate([numbers for numbers, _, _ in results])
    found = hvd.allgather(tf.constant(mine[None, :], tf.float64)).numpy()
    for by_rank, (_, expected, failure) in zip(np.split(found, len(results), axis=1), results, strict=True):
        wrong = np.flatnonzero(~np.isclose(by_rank, expected, rtol=TOLERANCE, atol=0).all(axis=1))
        if len(wrong):
            ends = ", ".join(f"rank {r} ended at {_show(by_rank[r])}" for r in wrong[:8])
            raise TrainingError(
                f"{failure}: every rank must end at {_show(expected)}, but {ends}{' and others' * (len(wrong) > 8)}; "
                "wrap the optimizer in hvd_cifar.distributed.DistributedOptimizer, with the op that its gradients need"
            )


def _show(values: Sequence[float] | NDArray[Any]) -> str:
    return "(" + ", ".join(f"{float(v):.6g}" for v in values) + ")"
