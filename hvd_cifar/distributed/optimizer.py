"""`DistributedOptimizer`: any Keras 3 optimizer, with gradients reduced over all ranks before they are applied.

Horovod's own wraps the hooks of Keras 2 (`get_gradients`, `_compute_gradients`, `_aggregate_gradients`). Keras 3 calls
none of them, so under it Horovod's wrapper trains every rank by itself, in silence. Keras 3 has one door through which
all gradients go, in `fit` as in a loop of one's own: `Optimizer.apply`. This module stands in that door.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.fixed_order import all_reduce_in_tree


@dataclass(frozen=True)
class _Reduction:
    op: Any
    compression: Any
    passes: int
    average_passes: bool
    process_set: Any
    sparse_as_dense: bool
    fixed_order: bool = False

    @property
    def is_local(self) -> bool:
        """Whether there is nobody to reduce with: alone, or not a member of the process set."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether what it makes of any tensor is its sum over the ranks, to the last bit, and at every call."""
        return self.op == hvd.Sum and self.compression is hvd.Compression.none and self.passes == 1


class _Distributed:
    """What `DistributedOptimizer` puts in front of the wrapped optimizer's own class."""

    _reduction: _Reduction

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        if self._reduction.passes > 1:
            # Kept out of `self.variables`: a checkpoint then fits the plain optimizer and any number of passes.
            self._pass_sums = [
                keras.Variable(initializer="zeros", shape=v.shape, dtype=v.dtype, trainable=False, name="pass_sum")
                for v in variables
            ]
            self._passes_done = keras.Variable(0, dtype="int64", trainable=False, name="passes_done")

    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if self._reduction.passes == 1 or not grads:
            super().apply(self.reduce(grads), variables)  # type: ignore[misc]
            return
        if not self.built:  # type: ignore[has-type]
            with keras.name_scope(self.name):  # type: ignore[attr-defined]
                self.build(variables or ())
            self.built = True
        if variables is None:
            variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        self._apply_every_few_passes(grads, variables)

    def apply_and_sum(self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """`apply`, with the `values` in the gradients' message; where the reduction `is_plain_sum`."""
        reduced = self.reduce([*grads, *values])
        super().apply(reduced[: len(grads)], list(variables))  # type: ignore[misc]
        return reduced[len(grads) :]

    def _apply_every_few_passes(self, grads: list[Any], variables: list[Any]) -> None:
        present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        sums = [self._pass_sums[self._get_variable_index(v)] for _, v in present]  # type: ignore[attr-defined]
        for total, (gradient, _) in zip(sums, present, strict=True):
            total.assign_add(tf.convert_to_tensor(gradient))
        self._passes_done.assign_add(1)

        def update() -> None:
            divisor = self._reduction.passes if self._reduction.average_passes else 1
            totals = [tf.convert_to_tensor(total) / divisor for total in sums]
            super(_Distributed, self).apply(self.reduce(totals), [v for _, v in present])  # type: ignore[misc]
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
    """Wrap a Keras 3 optimizer so that gradients are reduced over all ranks before they are applied.

    The result is an optimizer of a subclass with the same name and the same configuration, so it saves, loads and
    checkpoints as the wrapped one. It works through `apply` and `apply_gradients`, eagerly, in a `tf.function` and in
    `model.fit`, and inside a `keras.optimizers.LossScaleOptimizer`: ranks then skip a step together when the gradients
    of any of them are not finite. State that `optimizer` already has is taken over. `hvd.init()` comes first.

    In `fit` on a GPU compile the model with `jit_compile=False`: XLA cannot hold a Horovod operation.

    Args:
        optimizer: any Keras 3 optimizer, such as `keras.optimizers.SGD(0.1)`.
        op: "average" or "sum" over ranks (or `hvd.Average`, `hvd.Sum`).
        compression: "none", or "fp16" to send gradients in half precision (or one of `hvd.Compression`).
        backward_passes_per_step: gradients of this many calls are added up on each rank before they are reduced and
            applied; `iterations` counts the updates. Each rank must make the same number of calls.
        average_aggregated_gradients: divide that sum by the number of calls.
        process_set: the ranks that reduce together; a rank outside applies its own gradients.
        sparse_as_dense: turn `tf.IndexedSlices` into dense gradients before they are reduced. Otherwise their rows are
            gathered from all ranks.
        fixed_order: add gradients in the order of the ranks, in a binary tree (`fixed_order.all_reduce_in_tree`): the
            same terms give the same bits, however they are spread over ranks.

    Raises:
        TypeError: where `optimizer` is no Keras 3 optimizer.
        ValueError: where it is already distributed, is a LossScaleOptimizer (wrap its inner optimizer instead), or an
            argument is out of its range.
        RuntimeError: where Horovod is not initialised.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is already distributed: its gradients would be reduced twice")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError("put the loss scale outside: LossScaleOptimizer(DistributedOptimizer(optimizer))")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: it must be at least 1")
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() first")
    reduction = _Reduction(
        op=_named(op, {"average": hvd.Average, "sum": hvd.Sum}, "op"),
        compression=_named(compression, {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}, "compression"),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        fixed_order=fixed_order,
    )
    _agree_on_finite_gradients()

    plain = type(optimizer)
    # Name and module of the wrapped class: a saved model then names a class that anyone can load.
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    distributed = type(plain.__name__, (_Distributed, plain), names).from_config(optimizer.get_config())  # type: ignore[attr-defined]
    distributed._reduction = reduction
    if callable(optimizer._learning_rate):  # a schedule object, or a function, which no configuration can hold
        distributed._learning_rate = optimizer._learning_rate
    if optimizer.built:
        distributed.build(optimizer._trainable_variables)
        for target, source in zip(distributed.variables, optimizer.variables, strict=True):
            target.assign(source)
    return distributed


def apply_and_sum(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """`optimizer.apply`, and the sums of `values` over the ranks that the optimizer reduces over. A collective.

    They travel as one message where the gradients' may hold them, since each message makes the ranks' threads wait for
    each other once more. Beside gradients that are averaged, compressed or not reduced in every call, or that a loss
    scale looks at first, values go on their own.

    Args:
        optimizer: a `DistributedOptimizer`, or a LossScaleOptimizer around one.
        values: tensors of the gradients' floating type; the same shapes on every rank.

    Raises:
        TypeError: where `optimizer` is another one, or a value has another type.
    """
    distributed = getattr(optimizer, "inner_optimizer", optimizer)
    if not isinstance(distributed, _Distributed):
        raise TypeError(f"{type(distributed).__name__} is not a DistributedOptimizer")
    reduction = distributed._reduction
    if distributed is optimizer and reduction.is_plain_sum:
        return distributed.apply_and_sum(gradients, variables, values)
    # Not before the gradients are there: from the first tensor sent to the last the ranks' threads keep each other
    # awake, on cores that still compute.
    with tf.control_dependencies([g for g in gradients if g is not None]):
        values = [tf.identity(value) for value in values]
    sums = (
        values
        if reduction.is_local
        else collectives.all_reduce_each_in_graph(values, reduction.fixed_order, reduction.process_set)
    )
    optimizer.apply(gradients, variables)
    return sums


def reduce_gradients(gradients: Sequence[Any], reduction: _Reduction) -> list[Any]:
    """All-reduce gradients over the ranks; None stays None, and stands at the same places on every rank."""
    if reduction.is_local:
        return list(gradients)
    if reduction.sparse_as_dense:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    reduced: list[Any] = list(gradients)
    # Horovod's grouped operation mixes up the shapes of sparse gradients that follow dense ones, so these go alone.
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    # Horovod knows no bfloat16: such gradients travel as float32.
    wide = [
        tf.cast(g, tf.float32) if g.dtype == tf.bfloat16 else g
        for g in (_named_by_graph(tf.convert_to_tensor(gradients[i])) for i in dense)
    ]
    if wide:
        results = (
            _reduce_in_tree(wide, reduction)
            if reduction.fixed_order
            else hvd.grouped_allreduce(
                wide, op=reduction.op, compression=reduction.compression, process_set=reduction.process_set
            )
        )
        for i, result in zip(dense, results, strict=True):
            reduced[i] = tf.cast(result, gradients[i].dtype)
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _reduce_sparse(gradient, reduction)
    return reduced


def _named_by_graph(tensor: Any) -> Any:
    """In a graph, a node of its own in place of a tensor that may be captured from outside.

    Horovod matches the ranks' operations by the names of their inputs. A captured tensor's name is a count of all that
    the process ever made: where one rank has made more of them, the ranks would wait for each other for ever.
    """
    return tensor if tf.executing_eagerly() else tf.identity(tensor)


def _reduce_in_tree(gradients: list[Any], reduction: _Reduction) -> list[Any]:
    """Dense gradients, by type: the members of one message have one type."""
    packed = [reduction.compression.compress(gradient) for gradient in gradients]
    sums: list[Any] = [None] * len(packed)
    for dtype in sorted({tensor.dtype for tensor, _ in packed}, key=lambda dtype: dtype.name):
        chosen = [i for i, (tensor, _) in enumerate(packed) if tensor.dtype == dtype]
        for i, total in zip(
            chosen, all_reduce_in_tree([packed[i][0] for i in chosen], reduction.process_set), strict=True
        ):
            sums[i] = reduction.compression.decompress(total, packed[i][1])
    divisor = reduction.process_set.size() if reduction.op == hvd.Average else 1
    return [total / divisor for total in sums]


def _reduce_sparse(gradient: tf.IndexedSlices, reduction: _Reduction) -> tf.IndexedSlices:
    """Gather the rows of all ranks and add up those with the same index.

    Left apart, rows with the same index would be squared one by one in optimizers such as Adam.
    """
    values = gradient.values
    wide = tf.cast(values, tf.float32) if values.dtype == tf.bfloat16 else values
    packed, context = reduction.compression.compress(wide)
    gathered = hvd.allgather(packed, process_set=reduction.process_set)
    rows = hvd.allgather(gradient.indices, process_set=reduction.process_set)
    gathered = reduction.compression.decompress(gathered, context)
    if reduction.op == hvd.Average:
        gathered /= reduction.process_set.size()
    unique, positions = tf.unique(rows)
    total = tf.math.unsorted_segment_sum(gathered, positions, tf.size(unique))
    return tf.IndexedSlices(tf.cast(total, values.dtype), unique, gradient.dense_shape)


def _named(value: Any, names: dict[str, Any], what: str) -> Any:
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
        return names[value]
    if not any(value is known or value == known for known in names.values()):
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
    return value


def _agree_on_finite_gradients() -> None:
    """Teach Keras's LossScaleOptimizer to ask all ranks whether gradients are finite.

    It looks at this rank's gradients alone and then skips the inner `apply`, the all-reduce with it, for which the
    other ranks would wait for ever. Keras makes it by itself in `compile` under mixed_float16, so a subclass to be
    used in its place would not be. Outside a distributed optimizer its behaviour stays as it is.
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
