"""The start-up proof: updates on the path of training, of which each rank's part is visible in the result."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from . import collectives
from .errors import TrainingError
from .optimizer import apply_and_sum, inner_of, reduced_into, reduction_of
from .reduction import Reduction

HALF = 2e-3  # relative: half precision rounds to 11 bits
REMEDY = "wrap the optimizer in hvd_cifar.distributed.DistributedOptimizer, with the op that its gradients need"


def prove_averaging(optimizer: Any, contributions: Literal["average", "sum"] = "average") -> str:
    """Check that an optimizer averages gradients over all ranks, by updates whose results it does not apply.

    A collective. Element i of all gradients is 1 on rank i mod n and 0 on the other ranks, so the result shows each
    rank's part by itself, whatever the number n of ranks. The updates take the path of training in a `tf.function`:
    gradients and values go through the loss scale and `apply_and_sum`, up to the optimizer's own update, which is left
    out. Variables, slots and the loss scale stay as they are. Results must be exact, unless they are
    compressed, which rounds to 11 bits, or divided, which rounds the last bit.

    Args:
        optimizer: a `DistributedOptimizer`, or a LossScaleOptimizer around one; built.
        contributions: "average" if each rank feeds the gradient of its own mean, "sum" if it feeds its share of the
            global mean; the result must be the same.

    Returns:
        What was proven, in words.

    Raises:
        ValueError: where the optimizer is not built.
        TrainingError: on every rank, if on any rank the optimizer is not distributed, a reduced gradient is not the
            average, or a value beside the gradients is not the sum; it names ranks and numbers.
    """
    reduction = collectives.on_every_rank(lambda: _reduction_of(optimizer))
    found = collectives.all_gather_object(_failure(optimizer, reduction, contributions))
    for rank, failure in enumerate(found):
        if failure:
            raise TrainingError(f"{failure}, on rank {rank}; {REMEDY}")
    if hvd.size() == 1:
        return "one rank applies its own gradients"
    return f"gradients of which each rank has a part became their average, on all {hvd.size()} ranks"


def _reduction_of(optimizer: Any) -> Reduction:
    reduction = reduction_of(optimizer)
    if reduction is None:
        kind = type(optimizer).__name__
        raise TrainingError(f"gradients are not averaged over the ranks: {kind} is not distributed; {REMEDY}")
    if not optimizer.built:
        raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
    return reduction


def _failure(optimizer: Any, reduction: Reduction, contributions: str) -> str | None:
    """What is wrong with the updates on this rank, in words. A collective."""
    ranks, rank = 1, 0
    if not reduction.is_local:
        ranks, rank = reduction.process_set.size(), reduction.process_set.rank()
    variables = list(inner_of(optimizer)._trainable_variables)
    *begins, elements = accumulate((math.prod(v.shape) for v in variables), initial=0)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)

    @tf.function(autograph=False)
    def step(first: Any) -> Any:
        """One update, and the sums of values: float32 [ranks]."""
        with tf.GradientTape() as tape:
            loss = tf.zeros(())
            for begin, v in zip(begins, variables, strict=True):
                part = tf.cast(_owners(begin, v.shape, first, ranks) == rank, v.dtype)
                loss += tf.cast(tf.reduce_sum(v.value * part), tf.float32)
            loss = optimizer.scale_loss(loss) if scales else loss
        gradients = tape.gradient(loss, [v.value for v in variables])
        return apply_and_sum(optimizer, gradients, variables, [tf.one_hot(rank, ranks)])[0]

    sinks = [tf.Variable(tf.fill(v.shape, tf.cast(-1, v.dtype)), trainable=False) for v in variables]
    scale = [optimizer.step_counter, optimizer.dynamic_scale] if scales else []
    kept = [v.numpy() for v in scale]
    expected = (1 if reduction.average_passes else reduction.passes) / (ranks if contributions == "average" else 1)
    found = None
    with reduced_into(optimizer, sinks):
        for first in range(0, ranks, elements):  # with few elements only some ranks have one at a time
            for _ in range(reduction.passes):
                sums = step(tf.constant(first)).numpy()
            for begin, sink in zip(begins, sinks, strict=True):
                wrong = _wrong(sink.numpy(), expected, reduction)
                if len(wrong) and not found:
                    owner = int(_owners(begin, sink.shape, first, ranks).numpy().flat[wrong[0]])
                    value = float(sink.numpy().flat[wrong[0]])
                    found = f"gradients are not averaged over the ranks: what must be {expected:.6g} is {value:.6g} "
                    found += f"where the gradient is rank {owner}'s"
            if len(wrong := np.flatnonzero(sums != 1)) and not found:
                found = "values beside the gradients are not summed over the ranks: what must be 1 is "
                found += f"{sums[wrong[0]]:.6g} where the value is rank {wrong[0]}'s"
    for variable, value in zip(scale, kept, strict=True):
        variable.assign(value)
    return found


def _owners(begin: int, shape: Any, first: Any, ranks: int) -> Any:
    """The rank whose part each element of a gradient of `shape` is, whose first element has the number `begin`."""
    return tf.reshape((tf.range(begin, begin + math.prod(shape)) + first) % ranks, shape)


def _wrong(values: NDArray[Any], expected: float, reduction: Reduction) -> NDArray[np.int64]:
    """Where reduced gradients differ from `expected` by more than their rounding."""
    rounding = HALF if reduction.compression == "fp16" else 0.0
    if reduction.average or reduction.average_passes:
        rounding = max(rounding, 2.0 ** (1 - {2: 7, 4: 23, 8: 52}[values.dtype.itemsize]))
    return np.flatnonzero(~(np.abs(values.astype(np.float64) - expected) <= rounding * expected))
