"""What shows that ranks train together: updates of which each rank's part is visible, and equal variables."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from . import collectives
from .errors import TrainingError
from .optimizer import apply_and_sum, inner_of, reduction_of, watch_gradients
from .reduction import Reduction

HALF = 2e-3  # relative: half precision rounds to 11 bits
REMEDY = "wrap the optimizer in hvd_cifar.distributed.DistributedOptimizer, with the op that its gradients need"


def prove_averaging(optimizer: Any, contributions: Literal["average", "sum"] = "average") -> str:
    """Check that an optimizer averages gradients over all ranks, by updates whose results it does not apply.

    A collective. Element i of all gradients is 1 on rank i mod n and 0 on the other ranks, so the result shows each
    rank's part by itself, whatever the number n of ranks. The updates take the path of training in a `tf.function`, up
    to the optimizer's own update: variables, slots and the loss scale stay as they are. Results must be exact, unless
    they are compressed, which rounds to 11 bits, or divided, which rounds the last bit.

    Args:
        optimizer: a `DistributedOptimizer`, or a LossScaleOptimizer around one; built.
        contributions: "average" if each rank feeds the gradient of its own mean, "sum" if it feeds its share of the
            global mean; the result must be the same.

    Returns what was proven, in words.

    Raises:
        ValueError: where the optimizer is not built.
        TrainingError: on every rank, where on any the optimizer is not distributed, or a result is not the average of
            gradients or the sum of values beside them; it names ranks and numbers.
    """
    reduction = collectives.on_every_rank(lambda: _reduction_of(optimizer))
    for rank, failures in enumerate(collectives.all_gather_object(_failures(optimizer, reduction, contributions))):
        if failures:
            raise TrainingError(f"{failures[0]}, on rank {rank}; {REMEDY}")
    if hvd.size() == 1:
        return "one rank applies its own gradients"
    return f"gradients of which each rank has a part became their average, on all {hvd.size()} ranks"


def _reduction_of(optimizer: Any) -> Reduction:
    kind, reduction = type(optimizer).__name__, reduction_of(optimizer)
    if reduction is None:
        raise TrainingError(f"gradients are not averaged over the ranks: {kind} is not distributed; {REMEDY}")
    if not optimizer.built:
        raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
    return reduction


def _failures(optimizer: Any, reduction: Reduction, contributions: str) -> list[str]:
    """What is wrong with the updates on this rank, in words. A collective."""
    ranks, rank = 1, 0
    if not reduction.is_local:
        ranks, rank = reduction.process_set.size(), reduction.process_set.rank()
    inner = inner_of(optimizer)
    variables = list(inner._trainable_variables)
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

    def take(reduced: Sequence[Any]) -> bool:
        for sink, gradient in zip(sinks, reduced, strict=True):
            sink.assign(gradient)
        return True

    scale = [optimizer.step_counter, optimizer.dynamic_scale] if scales else []
    kept, watch = [v.numpy() for v in scale], inner._watch
    expected = (1 if reduction.average_passes else reduction.passes) / (ranks if contributions == "average" else 1)
    found = []
    watch_gradients(optimizer, take)
    try:
        for first in range(0, ranks, elements):  # with few elements only some ranks have one at a time
            for _ in range(reduction.passes):
                sums = step(tf.constant(first)).numpy()
            for begin, sink in zip(begins, sinks, strict=True):
                for i in _wrong(sink.numpy(), expected, reduction)[:1]:
                    value, owner = sink.numpy().flat[i], _owners(begin, sink.shape, first, ranks).numpy().flat[i]
                    what = f"what must be {expected:.6g} is {float(value):.6g} where the gradient is rank {owner}'s"
                    found.append(f"gradients are not averaged over the ranks: {what}")
            for i in np.flatnonzero(sums != 1)[:1]:
                what = f"what must be 1 is {sums[i]:.6g} where the value is rank {i}'s"
                found.append(f"values beside the gradients are not summed over the ranks: {what}")
    finally:
        watch_gradients(optimizer, watch)
        vars(inner).pop("_present", None)  # of these graphs
    for variable, kept_value in zip(scale, kept, strict=True):
        variable.assign(kept_value)
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


def find_divergence(variables: Sequence[keras.Variable]) -> tuple[str, str] | None:
    """Compare variables over all ranks. A collective; each rank sends 32 bytes if all are equal.

    Returns None if all bits are equal, else the path of the first variable that differs, and in words on which ranks,
    by how much, and how many after it differ also: the same on every rank.
    """
    if hvd.size() == 1:
        return None
    own = [hashlib.sha256(v.numpy().tobytes()).digest() for v in variables]
    everything = np.frombuffer(hashlib.sha256(b"".join(own)).digest(), np.uint8)
    if len(np.unique(hvd.allgather(tf.constant(everything)[None, :]).numpy(), axis=0)) == 1:
        return None
    by_rank = collectives.all_gather_object(own)
    first, *others = [i for i in range(len(own)) if len({theirs[i] for theirs in by_rank}) > 1]
    sides: dict[bytes, list[int]] = {}  # ranks of the same value
    for rank, theirs in enumerate(by_rank):
        sides.setdefault(theirs[first], []).append(rank)
    one, other = (rank for rank, *_ in list(sides.values())[:2])
    values: list[Any] = collectives.all_gather_object(variables[first].numpy() if hvd.rank() in (one, other) else None)
    with np.errstate(all="ignore"):
        apart = np.abs(values[one].astype(np.float64) - values[other].astype(np.float64))
    largest = float(np.nan_to_num(apart, nan=np.inf).max(initial=0.0))
    side, *rest = (f"rank{'s' * (len(side) > 1)} {', '.join(map(str, side))}" for side in sides.values())
    more = f"; {len(others)} variable{'s' * (len(others) > 1)} after it also" if others else ""
    path = variables[first].path
    return path, f"{path} is not the same on {side} as on {' and on '.join(rest)}, by {largest:.6g}{more}"
