"""`DistributedOptimizer`: any Keras 3 optimizer, with gradients reduced over all ranks before they are applied.

Horovod's own wrapper overrides hooks of Keras 2 (`get_gradients`, `_compute_gradients`, `_aggregate_gradients`).
Keras 3 calls none of them, so under it Horovod's wrapper trains every rank by itself, without an error. In Keras 3 all
gradients go through `Optimizer.apply`, in `fit` as in a loop of one's own. This module overrides that method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_cifar.distributed.fixed_order import all_reduce_in_tree
from hvd_cifar.distributed.subclass import put_in_front


@dataclass(frozen=True)
class Reduction:
    """What `DistributedOptimizer` makes of gradients; see its arguments."""

    average: bool = True
    half: bool = False
    passes: int = 1
    average_passes: bool = False
    process_set: Any = hvd.global_process_set
    sparse_as_dense: bool = False
    fixed_order: bool = False

    @property
    def is_local(self) -> bool:
        """Whether this rank reduces with no other: it is alone, or not a member of the process set."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether it returns, at every call and for any tensor, the sum over the ranks."""
        return not self.average and not self.half and self.passes == 1


class _Distributed:
    """The class that `DistributedOptimizer` puts in front of the optimizer's own.

    What accumulates gradients is neither an attribute that Keras tracks nor one of `variables`: a saved model or a
    checkpoint fits the plain optimizer and any number of passes.
    """

    _reduction: Reduction
    _pass_sums: list[keras.Variable]
    _passes_done: keras.Variable
    # Of the class behind.
    name: str
    built: bool
    _trainable_variables: list[keras.Variable]
    _get_variable_index: Callable[[Any], int]

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        self._make_pass_sums()

    def _make_pass_sums(self) -> None:
        if self._reduction.passes == 1 or "_pass_sums" in vars(self):
            return
        zeros = [_local_variable(v.shape, v.dtype, "pass_sum") for v in self._trainable_variables]
        object.__setattr__(self, "_pass_sums", zeros)
        object.__setattr__(self, "_passes_done", _local_variable((), "int64", "passes_done"))

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if self._reduction.passes == 1 or not grads:
            super().apply(self.reduce(grads), variables)  # type: ignore[misc]
            return
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables or ())
            self.built = True
        if variables is None:
            variables = list(self._trainable_variables)
        self._apply_every_few_passes(grads, variables)

    def apply_and_sum(self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """`apply`, with the `values` in the gradients' message; only where the reduction `is_plain_sum`."""
        reduced = self.reduce([*grads, *values])
        super().apply(reduced[: len(grads)], list(variables))  # type: ignore[misc]
        return reduced[len(grads) :]

    def _apply_every_few_passes(self, grads: list[Any], variables: list[Any]) -> None:
        present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        sums = [self._pass_sums[self._get_variable_index(v)] for _, v in present]
        for total, (gradient, _) in zip(sums, present, strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))
        self._passes_done.assign_add(1)

        def update() -> None:
            divisor = self._reduction.passes if self._reduction.average_passes else 1
            totals = self.reduce([tf.convert_to_tensor(total) / divisor for total in sums])
            super(_Distributed, self).apply(totals, [v for _, v in present])  # type: ignore[misc]
            for total in sums:
                total.assign(tf.zeros_like(total.value))
            self._passes_done.assign(0)

        tf.cond(self._passes_done.value >= self._reduction.passes, update, lambda: None)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """What `apply` applies: gradients reduced over the ranks."""
        return reduce_gradients(gradients, self._reduction)

    def on_all_ranks(self, condition: Any) -> Any:
        """Whether `condition`, a boolean scalar of each rank, holds on all of them."""
        if self._reduction.is_local:
            return condition
        failed = tf.cast(tf.logical_not(condition), tf.float32)
        return hvd.allreduce(failed, op=hvd.Sum, process_set=self._reduction.process_set) == 0.0


def _local_variable(shape: Any, dtype: Any, name: str) -> keras.Variable:
    return keras.Variable(initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=name)


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer,
    *,
    op: Literal["average", "sum"] | Any = "average",
    compression: Literal["none", "fp16"] | Any = "none",
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = hvd.global_process_set,
    sparse_as_dense: bool = False,
    fixed_order: bool = False,
) -> Any:
    """Make a Keras 3 optimizer reduce its gradients over all ranks before it applies them.

    The optimizer itself is changed and returned. Its class becomes a subclass of the same name, which overrides
    `apply`. All its state stays: slots, exclusions from weight decay, schedules, moving averages, names. It saves,
    loads and checkpoints as before; `keras.models.load_model` returns a plain optimizer, which is to be wrapped again.

    It works through `apply` and `apply_gradients`, eagerly, in a `tf.function` and in `model.fit`, and inside a
    `keras.optimizers.LossScaleOptimizer`: ranks then skip a step together when the gradients of any of them are not
    finite. A LossScaleOptimizer that is given here stays outside; its inner optimizer reduces the gradients.

    `hvd.init()` comes first. Wrap before the first step: a `tf.function` or a `fit` that has traced the plain optimizer
    keeps calling it, so compile such a model again. In `fit` on a GPU compile the model with `jit_compile=False`: XLA
    cannot hold a Horovod operation.

    Args:
        optimizer: any Keras 3 optimizer, built or not, such as `keras.optimizers.SGD(0.1)`.
        op: "average" or "sum" over ranks (or `hvd.Average`, `hvd.Sum`). "sum" is for ranks that each feed their share
            of a global mean.
        compression: "none", or "fp16" to send gradients in half precision (or one of `hvd.Compression`). The ranks cast
            what "average" would be given: under "sum" a share times the number of ranks. The number of ranks then
            changes neither what underflows (below 6e-8) nor what overflows (above 65504) in the cast. Ranks add in half
            precision: over n of them a mean above 65504 / n becomes infinite (128 on 512 ranks).
        backward_passes_per_step: the optimizer adds up the gradients of this many calls on each rank before it reduces
            and applies them; `iterations` counts the updates. Each rank must make the same number of calls.
        average_aggregated_gradients: divide that sum by the number of calls.
        process_set: the ranks that reduce together; a rank outside applies its own gradients.
        sparse_as_dense: turn `tf.IndexedSlices` into dense gradients before they are reduced. Otherwise all ranks
            gather their rows.
        fixed_order: add gradients in the order of the ranks, in a binary tree (`fixed_order.all_reduce_in_tree`): the
            same terms give the same bits, however they are spread over ranks. Sparse gradients become dense.

    Raises:
        TypeError: where `optimizer` is no Keras 3 optimizer.
        ValueError: where it is already distributed, or an argument is out of its range.
        RuntimeError: where Horovod is not initialised.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}")
    inner = inner_of(optimizer)
    if isinstance(inner, _Distributed):
        raise ValueError("this optimizer is already distributed: its gradients would be reduced twice")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: it must be at least 1")
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    reduction = Reduction(
        average=_named(op, {"average": hvd.Average, "sum": hvd.Sum}, "op") == hvd.Average,
        half=_named(compression, {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}, "compression")
        is hvd.Compression.fp16,
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        fixed_order=fixed_order,
    )
    _agree_on_finite_gradients()

    # Not a copy: it would share Keras's trackers, and the original, which does not reduce, could be used by mistake.
    put_in_front(_Distributed, inner, _reduction=reduction)
    if inner.built:
        inner._make_pass_sums()
    return optimizer


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def reduction_of(optimizer: Any) -> Reduction | None:
    """What a `DistributedOptimizer`, or a LossScaleOptimizer around one, makes of gradients; None for any other."""
    inner = inner_of(optimizer)
    return inner._reduction if isinstance(inner, _Distributed) else None


def apply_and_sum(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """`optimizer.apply`, and the sums of `values` over the ranks that the optimizer reduces over. A collective.

    Values travel in the gradients' message where that is possible, since each message makes the ranks' threads wait for
    each other once more. They travel in one of their own beside gradients that are averaged, compressed or not reduced
    at every call, or that a loss scale inspects first. Either way they are sent as they are, without compression.

    Args:
        optimizer: a `DistributedOptimizer`, or a LossScaleOptimizer around one.
        values: tensors; the same types and shapes on every rank.

    Raises:
        TypeError: where `optimizer` is another one.
    """
    reduction = reduction_of(optimizer)
    if reduction is None:
        raise TypeError(f"{type(optimizer).__name__} is not a DistributedOptimizer")
    if isinstance(optimizer, _Distributed) and reduction.is_plain_sum:
        return optimizer.apply_and_sum(gradients, variables, values)
    # Not before the gradients are there: from the first tensor sent to the last the ranks' threads keep each other
    # awake, on cores that still compute.
    with tf.control_dependencies([g for g in gradients if g is not None]):
        values = [tf.identity(value) for value in values]
    sums = values if reduction.is_local else _all_reduce(values, hvd.Sum, reduction)
    optimizer.apply(gradients, variables)
    return sums


def reduce_gradients(gradients: Sequence[Any], reduction: Reduction) -> list[Any]:
    """All-reduce gradients of any floating types over the ranks, as operations of the step's own graph. A collective.

    Args:
        gradients: tensors, `tf.IndexedSlices`, or None, which stays None; the same kinds, types and shapes on every
            rank.
    """
    if reduction.is_local:
        return list(gradients)
    if reduction.sparse_as_dense or reduction.fixed_order:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    reduced: list[Any] = list(gradients)
    # Horovod's grouped operation mixes up the shapes of sparse gradients that follow dense ones, so these go alone.
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    ranks = reduction.process_set.size()
    packed = [pack(_named_by_graph(tf.convert_to_tensor(gradients[i])), reduction, ranks) for i in dense]
    by_horovod = reduction.average and not reduction.half and not reduction.fixed_order
    totals = _all_reduce(packed, hvd.Average if by_horovod else hvd.Sum, reduction)
    for i, total in zip(dense, totals, strict=True):
        dtype = gradients[i].dtype
        reduced[i] = tf.cast(total, dtype) if by_horovod else unpack(total, dtype, reduction, ranks)
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _reduce_sparse(gradient, reduction)
    return reduced


def pack(gradient: Any, reduction: Reduction, ranks: int) -> Any:
    """A rank's gradient as it travels. Local."""
    # Horovod knows no bfloat16.
    wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
    if not reduction.half:
        return wide
    # Shares of a global mean shrink with the number of ranks, and would underflow on many.
    return tf.cast(wide if reduction.average else wide * ranks, tf.float16)


def unpack(total: Any, dtype: Any, reduction: Reduction, ranks: int) -> Any:
    """The reduced gradient, of type `dtype`, from the sum of what all ranks packed. Local."""
    wide = tf.cast(total, tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype)
    if reduction.average or reduction.half:  # what `pack` multiplied by, or the divisor of the mean
        wide = wide / ranks
    return tf.cast(wide, dtype)


def _all_reduce(tensors: Sequence[Any], op: Any, reduction: Reduction) -> list[Any]:
    """Tensors of several types over the ranks: a message for each type, in the same order on every rank."""
    totals: list[Any] = [None] * len(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=lambda dtype: dtype.name):
        chosen = [i for i, t in enumerate(tensors) if t.dtype == dtype]
        message = [tensors[i] for i in chosen]
        found = (
            all_reduce_in_tree(message, reduction.process_set)
            if reduction.fixed_order
            else hvd.grouped_allreduce(message, op=op, process_set=reduction.process_set)
        )
        for i, total in zip(chosen, found, strict=True):
            totals[i] = total
    return totals


def _named_by_graph(tensor: Any) -> Any:
    """In a graph, a node of its own for a tensor that may be captured from outside.

    Horovod matches the ranks' operations by the names of their inputs. A captured tensor's name is a count of all that
    the process ever made: ranks that have made different numbers of them would wait for each other for ever.
    """
    return tensor if tf.executing_eagerly() else tf.identity(tensor)


def _reduce_sparse(gradient: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """Gather the rows of all ranks and add up those with the same index.

    Optimizers such as Adam would square rows with the same index one by one if they stayed apart.
    """
    process_set, ranks = reduction.process_set, reduction.process_set.size()
    packed = pack(_named_by_graph(gradient.values), reduction, ranks)
    rows = hvd.allgather(packed, process_set=process_set)
    indices = hvd.allgather(_named_by_graph(gradient.indices), process_set=process_set)
    dtype = gradient.values.dtype
    wide = unpack(rows, tf.float32 if dtype == tf.bfloat16 else dtype, reduction, ranks)
    unique, positions = tf.unique(indices)
    total = tf.math.unsorted_segment_sum(wide, positions, tf.size(unique))
    return tf.IndexedSlices(tf.cast(total, dtype), unique, gradient.dense_shape)


def _named(value: Any, names: dict[str, Any], what: str) -> Any:
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
        return names[value]
    if not any(value is known or value == known for known in names.values()):
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
    return value


def _agree_on_finite_gradients() -> None:
    """Make Keras's LossScaleOptimizer ask all ranks whether gradients are finite.

    It looks at this rank's gradients alone and then skips the inner `apply`, with the all-reduce for which the other
    ranks would wait for ever. Keras makes the LossScaleOptimizer by itself in `compile` under mixed_float16, so a
    subclass would not be used. Around any other optimizer it behaves as before.
    """
    loss_scale = keras.optimizers.LossScaleOptimizer
    local_check = loss_scale.check_finite
    if getattr(local_check, "asks_all_ranks", False):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local_check(self, grads)
        inner = self.inner_optimizer
        return inner.on_all_ranks(finite) if isinstance(inner, _Distributed) else finite

    check_finite.asks_all_ranks = True  # type: ignore[attr-defined]
    loss_scale.check_finite = check_finite
