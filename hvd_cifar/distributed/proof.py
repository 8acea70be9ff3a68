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
    found = collectives.all_gather_object(_Proof(optimizer, reduction, contributions).failure())
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


class _Proof:
    """The updates of one proof, and what is wrong with their results."""

    def __init__(self, optimizer: Any, reduction: Reduction, contributions: str) -> None:
        self.optimizer, self.reduction = optimizer, reduction
        members = reduction.process_set
        self.ranks: int = 1 if reduction.is_local else members.size()
        self.rank: int = 0 if reduction.is_local else members.rank()
        self.variables = list(inner_of(optimizer)._trainable_variables)
        self.sizes = [math.prod(v.shape) for v in self.variables]
        *self.begins, self.elements = accumulate(self.sizes, initial=0)
        passes = 1 if reduction.average_passes else reduction.passes
        self.expected = passes / (self.ranks if contributions == "average" else 1)
        self.divides = reduction.average or reduction.average_passes

    def failure(self) -> str | None:
        """What is wrong on this rank, in words. A collective."""
        sinks = [tf.Variable(tf.fill(v.shape, tf.cast(-1, v.dtype)), trainable=False) for v in self.variables]
        step = tf.function(self._step, autograph=False)
        scale = [self.optimizer.step_counter, self.optimizer.dynamic_scale] if self._scales else []
        kept = [v.numpy() for v in scale]
        found = None
        with reduced_into(self.optimizer, sinks):
            for first in range(0, self.ranks, self.elements):  # with few elements only some ranks have one at a time
                for _ in range(self.reduction.passes):
                    sums = step(tf.constant(first))
                found = found or self._wrong(sinks, sums.numpy(), first)
        for variable, value in zip(scale, kept, strict=True):
            variable.assign(value)
        return found

    @property
    def _scales(self) -> bool:
        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)

    def _owners(self, begin: int, count: int, first: Any) -> Any:
        """The rank whose part each of `count` elements from `begin` on is: int64 [count]."""
        return (tf.range(begin, begin + count, dtype=tf.int64) + tf.cast(first, tf.int64)) % self.ranks

    def _step(self, first: Any) -> Any:
        """One update, and the sums of values: float32 [ranks]."""
        parts = [
            tf.reshape(tf.cast(self._owners(begin, size, first) == self.rank, v.dtype), v.shape)
            for begin, size, v in zip(self.begins, self.sizes, self.variables, strict=True)
        ]
        with tf.GradientTape() as tape:
            products = [tf.reduce_sum(v.value * part) for v, part in zip(self.variables, parts, strict=True)]
            loss = tf.add_n([tf.cast(product, tf.float32) for product in products])
            loss = self.optimizer.scale_loss(loss) if self._scales else loss
        gradients = tape.gradient(loss, [v.value for v in self.variables])
        (sums,) = apply_and_sum(self.optimizer, gradients, self.variables, [tf.one_hot(self.rank, self.ranks)])
        return sums

    def _wrong(self, sinks: list[Any], sums: NDArray[Any], first: int) -> str | None:
        for begin, sink in zip(self.begins, sinks, strict=True):
            values = sink.numpy().ravel().astype(np.float64)
            rounding = HALF if self.reduction.compression == "fp16" else 0.0
            if self.divides:
                rounding = max(rounding, 2.0 ** (1 - {2: 7, 4: 23, 8: 52}[sink.dtype.size]))
            apart = np.flatnonzero(~(np.abs(values - self.expected) <= rounding * self.expected))
            if len(apart):
                owner = int(self._owners(begin, len(values), first).numpy()[apart[0]])
                return (
                    f"gradients are not averaged over the ranks: what must be {self.expected:.6g} is "
                    f"{values[apart[0]]:.6g} where the gradient is rank {owner}'s"
                )
        wrong = np.flatnonzero(sums != 1)
        if len(wrong):
            return (
                f"values beside the gradients are not summed over the ranks: what must be 1 is {sums[wrong[0]]:.6g} "
                f"where the value is rank {wrong[0]}'s"
            )
        return None
