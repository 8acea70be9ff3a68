"""`DistributedOptimizer`: any Keras 3 optimizer, with gradients reduced over all ranks before they are applied.

Horovod's own wrapper overrides hooks of Keras 2 (`get_gradients`, `_compute_gradients`, `_aggregate_gradients`).
Keras 3 calls none of them: with Horovod's wrapper each rank trains alone, without an error. In Keras 3 all gradients go
through `Optimizer.apply`, in `fit` and in a user's own loop. This module overrides that method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any, Literal, TypeVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvd_cifar.distributed import buckets, names
from hvd_cifar.distributed.fixed_order import all_reduce_in_tree
from hvd_cifar.distributed.subclass import put_in_front

OptimizerT = TypeVar("OptimizerT", bound=keras.optimizers.Optimizer)


@dataclass(frozen=True)
class Reduction:
    """How `DistributedOptimizer` reduces gradients; see its arguments."""

    average: bool = True
    compression: str = "none"
    passes: int = 1
    average_passes: bool = False
    process_set: Any = hvd.global_process_set
    sparse_as_dense: bool = False
    fixed_order: bool = False
    bucket_bytes: int | None = None

    @property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing: it is the only member of the process set, or no member."""
        return not self.process_set.included() or self.process_set.size() == 1

    @property
    def is_plain_sum(self) -> bool:
        """Whether each call returns the uncompressed sum over the ranks."""
        return not self.average and self.compression == "none" and self.passes == 1


class _Distributed:
    """The class that `DistributedOptimizer` puts in front of the optimizer's own.

    Keras does not track the variables that accumulate gradients, and `variables` does not list them: a saved model or
    checkpoint fits the plain optimizer, and any number of passes.
    """

    _reduction: Reduction
    _watch: Callable[[Sequence[Any]], None] | None = None
    _sinks: Sequence[Any] | None = None  # variables that take the reduced gradients in the update's place
    _pass_sums: list[keras.Variable]
    _passes_done: keras.Variable
    # Attributes of the optimizer's own class.
    name: str
    built: bool
    _trainable_variables: list[keras.Variable]
    _get_variable_index: Callable[[Any], int]
    _check_variables_are_known: Callable[[list[Any]], None]

    def build(self, variables: Sequence[Any]) -> None:
        super().build(variables)  # type: ignore[misc]
        self._make_pass_sums()

    def __reduce__(self) -> Any:
        # By Keras's own a copy would be a plain optimizer: each rank would train alone, without an error.
        raise TypeError("a DistributedOptimizer cannot be copied or pickled: copy the plain optimizer, and wrap both")

    def _make_pass_sums(self) -> None:
        if self._reduction.passes == 1 or "_pass_sums" in vars(self):
            return
        # In float32 where the variable is of half precision, in which many terms are no longer added.
        kinds = ["float32" if v.dtype in ("bfloat16", "float16") else v.dtype for v in self._trainable_variables]
        pairs = zip(self._trainable_variables, kinds, strict=True)
        zeros = [_local_variable(v.shape, kind, "pass_sum") for v, kind in pairs]
        object.__setattr__(self, "_pass_sums", zeros)
        object.__setattr__(self, "_passes_done", _local_variable((), "int64", "passes_done"))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if not grads or self._reduction.passes == 1:
            self._apply_reduced(self.reduce(grads), variables)
            return
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables or ())
            self.built = True
        if variables is None:
            variables = list(self._trainable_variables)
        self._check_variables_are_known(variables)
        self._apply_every_few_passes(grads, variables)

    @tf.autograph.experimental.do_not_convert
    def apply_and_sum(self, grads: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """`apply`, with the `values` in the gradients' message; only where the reduction `is_plain_sum`."""
        reduced = self.reduce([*grads, *values])
        self._apply_reduced(reduced[: len(grads)], list(variables))
        return reduced[len(grads) :]

    def _apply_reduced(self, reduced: list[Any], variables: list[Any] | None) -> None:
        if self._sinks is not None:
            for sink, gradient in zip(self._sinks, reduced, strict=True):
                sink.assign(gradient)
            return
        if self._watch:
            self._watch(reduced)
        super().apply(reduced, variables)  # type: ignore[misc]

    def _apply_every_few_passes(self, grads: list[Any], variables: list[Any]) -> None:
        present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        indices = [self._get_variable_index(v) for _, v in present]
        if other := vars(self).setdefault("_present", set(indices)) ^ set(indices):
            raise ValueError(
                "with backward_passes_per_step every pass must have gradients of the same variables, and only some "
                f"have one of {self._trainable_variables[min(other)].path}: give zeros instead of None"
            )
        sums = [self._pass_sums[index] for index in indices]
        for total, (gradient, _) in zip(sums, present, strict=True):
            total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        self._passes_done.assign_add(1)

        def update() -> None:
            divisor = self._reduction.passes if self._reduction.average_passes else 1
            totals = [tf.convert_to_tensor(total) / divisor for total in sums]
            reduced = self.reduce(totals)
            self._apply_reduced(reduced, [v for _, v in present])
            for total in sums:
                total.assign(tf.zeros_like(total.value))
            self._passes_done.assign(0)
            if tf.executing_eagerly():  # a graph, which is traced once, keeps to its variables
                del vars(self)["_present"]

        tf.cond(self._passes_done.value >= self._reduction.passes, update, lambda: None)

    def reduce(self, gradients: Sequence[Any]) -> list[Any]:
        """Gradients reduced over the ranks, as `apply` applies them."""
        return reduce_gradients(gradients, self._reduction)

    def on_all_ranks(self, condition: Any) -> Any:
        """Whether `condition`, a boolean scalar of each rank, holds on all of them."""
        if self._reduction.is_local:
            return condition
        failed = tf.cast(tf.logical_not(condition), tf.float32)
        name = names.in_graph("Allreduce", "not_finite")
        return hvd.allreduce(failed, op=hvd.Sum, process_set=self._reduction.process_set, **name) == 0.0


def _local_variable(shape: Any, dtype: Any, name: str) -> keras.Variable:
    return keras.Variable(initializer="zeros", shape=shape, dtype=dtype, trainable=False, name=name)


def DistributedOptimizer(
    optimizer: OptimizerT,
    *,
    op: Literal["average", "sum"] | Any = "average",
    compression: str | Any = "none",
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: Any = hvd.global_process_set,
    sparse_as_dense: bool = False,
    fixed_order: bool = False,
    bucket_bytes: int | None = None,
) -> OptimizerT:
    """Make a Keras 3 optimizer reduce its gradients over all ranks before it applies them.

    Arguments are keywords. Those up to `sparse_as_dense` have the names and meanings of Horovod's; its other arguments
    do not exist here. `fixed_order` and `bucket_bytes` are this project's own.

    The optimizer itself is changed and returned. Its class becomes a subclass of the same name, which overrides
    `apply`. All its state stays: slots, exclusions from weight decay, schedules, moving averages, names. It saves,
    loads and checkpoints as before. `keras.models.load_model` and `copy.deepcopy` of a compiled model return a plain
    optimizer: wrap it again. The optimizer itself cannot be copied or pickled: copy the plain one, and wrap both.

    It works through `apply` and `apply_gradients`, eagerly, in a `tf.function` and in `model.fit`, and inside a
    `keras.optimizers.LossScaleOptimizer`: ranks then skip a step together when the gradients of any of them are not
    finite. A LossScaleOptimizer that is given here stays outside; its inner optimizer reduces the gradients.

    Call `hvd.init()` first. A graph holds the number of ranks: under `hvd.elastic.run` make a `tf.function` inside the
    decorated function. Wrap before the first step: a `tf.function` or `fit` that was traced with the plain
    optimizer does not reduce, so compile such a model again. For `fit` on a GPU, compile the model with
    `jit_compile=False`: XLA cannot compile Horovod's operations.

    Ranks with other numbers of batches may end with `hvd.join()` only where all gradients are dense and `fixed_order`
    is not set: Horovod hangs where a rank has joined and others gather rows or terms. `sparse_as_dense=True` makes all
    gradients dense. Averages still divide by the number of all ranks.

    Args:
        optimizer: any Keras 3 optimizer, built or not, such as `keras.optimizers.SGD(0.1)`.
        op: "average" or "sum" over ranks (or `hvd.Average`, `hvd.Sum`). "sum" is for ranks that each feed their share
            of a global mean.
        compression: "none" or "fp16" (or `hvd.Compression.none`, `hvd.Compression.fp16`).
            fp16 sends gradients in half precision. Under "sum" each rank multiplies its share by the number of ranks
            before the cast, so that what underflows (below 6e-8) or overflows (above 65504) in the cast does not
            depend on the number of ranks. The sum is computed in half precision: over n ranks a mean above 65504 / n
            becomes infinite (128 on 512 ranks).
        backward_passes_per_step: each rank adds up the gradients of this many calls before they are reduced and
            applied; `iterations` counts the updates. Each rank must make the same number of calls, and each call have
            gradients of the same variables.
        average_aggregated_gradients: divide that sum by the number of calls.
        process_set: the ranks that reduce together; a rank outside applies its own gradients.
        sparse_as_dense: turn `tf.IndexedSlices` into dense gradients before they are reduced. Otherwise each rank
            gathers the rows of all ranks. Rows of one index are added, also on a single rank.
        fixed_order: add gradients in the order of the ranks, in a binary tree (`fixed_order.all_reduce_in_tree`): the
            same terms give the same bits on 1, 2, 4, ... ranks. Sparse gradients become dense.
        bucket_bytes: size of a message. In a graph a message leaves when backward has computed its gradients. None: all
            gradients leave in one message after backward. Sums differ by rounding only.

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
    _check_count("backward_passes_per_step", backward_passes_per_step)
    if bucket_bytes is not None:
        _check_count("bucket_bytes", bucket_bytes)
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    if getattr(process_set, "process_set_id", 0) is None:
        raise ValueError("process_set is not registered: give it to hvd.init(process_sets=[...]) on every rank")
    reduction = Reduction(
        average=_named(op, {"average": hvd.Average, "sum": hvd.Sum}, "op") == hvd.Average,
        compression=_compression(compression),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        fixed_order=fixed_order,
        bucket_bytes=bucket_bytes,
    )
    _adapt_loss_scale()

    # Not a copy: a copy shares Keras's trackers, and the original, which does not reduce, could be used by mistake.
    put_in_front(_Distributed, inner, _reduction=reduction)
    if inner.built:
        inner._make_pass_sums()
    return optimizer


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value}: it must be an integer, at least 1")


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def reduction_of(optimizer: Any) -> Reduction | None:
    """The reduction of a `DistributedOptimizer`, also inside a LossScaleOptimizer; None for any other optimizer."""
    inner = inner_of(optimizer)
    return inner._reduction if isinstance(inner, _Distributed) else None


def process_set_of(optimizer: Any) -> Any:
    """The ranks over which a `DistributedOptimizer` reduces."""
    reduction = reduction_of(optimizer)
    return reduction.process_set if reduction else hvd.global_process_set


def set_bucket_bytes(optimizer: Any, bucket_bytes: int | None) -> None:
    """Change a `DistributedOptimizer`'s `bucket_bytes`, before its first step."""
    inner = inner_of(optimizer)
    inner._reduction = replace(inner._reduction, bucket_bytes=bucket_bytes)


def watch_gradients(optimizer: Any, watch: Callable[[Sequence[Any]], None]) -> None:
    """Have `watch` called with the reduced gradients before a `DistributedOptimizer` applies them.

    Call this before the first step; in a graph `watch` is called once, when the graph is traced.
    """
    object.__setattr__(inner_of(optimizer), "_watch", watch)


@contextmanager
def reduced_into(optimizer: Any, sinks: Sequence[Any]) -> Iterator[None]:
    """In this block a `DistributedOptimizer` assigns reduced gradients to `sinks` instead of applying them.

    A graph that is traced here keeps to it.
    """
    inner = inner_of(optimizer)
    object.__setattr__(inner, "_sinks", sinks)
    try:
        yield
    finally:
        object.__setattr__(inner, "_sinks", None)
        vars(inner).pop("_present", None)  # of this graph


def apply_and_sum(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """`optimizer.apply`, and the sums of `values` over the ranks that the optimizer reduces over. A collective.

    Values travel in the gradients' message if possible: each message costs one more synchronisation of the ranks. They
    need a message of their own if gradients are averaged, compressed, not reduced at every call, or inspected by a loss
    scale first. Values are never compressed.

    Args:
        optimizer: a `DistributedOptimizer`, or a LossScaleOptimizer around one.
        values: tensors; the same types and shapes on every rank.

    Raises:
        TypeError: where `optimizer` is any other.
    """
    reduction = reduction_of(optimizer)
    if reduction is None:
        raise TypeError(f"{type(optimizer).__name__} is not a DistributedOptimizer")
    if isinstance(optimizer, _Distributed) and reduction.is_plain_sum:
        return optimizer.apply_and_sum(gradients, variables, values)
    # After the gradients: between a step's first message and its last, Horovod's threads poll on cores that compute.
    with tf.control_dependencies([g for g in gradients if g is not None]):
        values = [tf.identity(value) for value in values]
    sums = values if reduction.is_local else _all_reduce(values, hvd.Sum, reduction)
    optimizer.apply(gradients, variables)
    return sums


def reduce_gradients(gradients: Sequence[Any], reduction: Reduction) -> list[Any]:
    """All-reduce gradients of any floating types over the ranks; in a graph, as its operations. A collective.

    Args:
        gradients: tensors, `tf.IndexedSlices`, or None, which stays None; the same kinds, types and shapes on every
            rank.
    """
    if reduction.sparse_as_dense or reduction.fixed_order:
        gradients = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    if reduction.is_local:
        return [_with_sums_of_rows(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients]
    reduced: list[Any] = list(gradients)
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    ranks = reduction.process_set.size()
    packed = [pack(tf.convert_to_tensor(gradients[i]), reduction, ranks) for i in dense]
    by_horovod = reduction.average and reduction.compression == "none" and not reduction.fixed_order
    totals = _all_reduce(packed, hvd.Average if by_horovod else hvd.Sum, reduction)
    for i, total in zip(dense, totals, strict=True):
        dtype = gradients[i].dtype
        reduced[i] = tf.cast(total, dtype) if by_horovod else unpack(total, dtype, reduction, ranks)
    for i, gradient in enumerate(gradients):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _reduce_sparse(gradient, reduction)
    return reduced


def pack(gradient: Any, reduction: Reduction, ranks: int) -> Any:
    """A rank's gradient in the type and scale in which it is sent. Local."""
    # Horovod cannot add bfloat16.
    wide = tf.cast(gradient, tf.float32) if gradient.dtype == tf.bfloat16 else gradient
    if reduction.compression != "fp16":
        return wide
    # A share of a global mean shrinks as the number of ranks grows, until it underflows in half precision.
    return tf.cast(wide if reduction.average else wide * ranks, tf.float16)


def sent_width(dtype: Any, compression: str) -> int:
    """Bytes of one value of a gradient as `pack` sends it."""
    if compression == "fp16":
        return 2
    dtype = tf.as_dtype(dtype)
    return 4 if dtype == tf.bfloat16 else int(dtype.size)


def sent_bytes(like: Any, compression: str) -> int:
    """Bytes of a gradient as `pack` sends it. `like`: its variable, or a tensor."""
    return math.prod(like.shape) * sent_width(like.dtype, compression)


def unpack(total: Any, dtype: Any, reduction: Reduction, ranks: int) -> Any:
    """The reduced gradient, of type `dtype`, from the sum of what all ranks packed. Local."""
    wide = tf.cast(total, tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype)
    if reduction.average or reduction.compression == "fp16":  # makes the mean, or undoes the factor of `pack`
        wide = wide / ranks
    return tf.cast(wide, dtype)


def _all_reduce(tensors: Sequence[Any], op: Any, reduction: Reduction) -> list[Any]:
    """All-reduce tensors in buckets of one type each. Every rank sends the same buckets in the same order."""
    totals: list[Any] = [None] * len(tensors)
    in_order = buckets.order(tensors) if reduction.bucket_bytes else list(range(len(tensors)))
    members: list[list[int]] = []
    for dtype in sorted({t.dtype for t in tensors}, key=lambda dtype: dtype.name):
        chosen = [i for i in in_order if tensors[i].dtype == dtype]
        sizes = [(tensors[i].shape.num_elements() or 0) * dtype.size for i in chosen]
        members += [[chosen[i] for i in bucket] for bucket in buckets.plan(sizes, reduction.bucket_bytes)]
    members.sort(key=lambda bucket: max(map(in_order.index, bucket)))
    messages = [buckets.flat([tensors[i] for i in bucket]) for bucket in members]
    if reduction.bucket_bytes:
        buckets.gate(messages)
    for bucket, message in zip(members, messages, strict=True):
        if reduction.fixed_order:
            (total,) = all_reduce_in_tree([message], reduction.process_set)
        else:
            name = names.in_graph("Allreduce", "gradients")
            total = hvd.allreduce(message, op=op, process_set=reduction.process_set, **name)
        for i, piece in zip(bucket, buckets.pieces(total, [tensors[i] for i in bucket]), strict=True):
            totals[i] = piece
    return totals


def _reduce_sparse(gradient: tf.IndexedSlices, reduction: Reduction) -> tf.IndexedSlices:
    """Gather the rows of all ranks and add up those with the same index."""
    process_set, ranks = reduction.process_set, reduction.process_set.size()
    packed = pack(gradient.values, reduction, ranks)
    rows = hvd.allgather(packed, process_set=process_set, **names.in_graph("Allgather", "rows"))
    indices = hvd.allgather(gradient.indices, process_set=process_set, **names.in_graph("Allgather", "indices"))
    dtype = gradient.values.dtype
    wide = unpack(rows, tf.float32 if dtype == tf.bfloat16 else dtype, reduction, ranks)
    summed = _with_sums_of_rows(tf.IndexedSlices(wide, indices, gradient.dense_shape))
    return tf.IndexedSlices(tf.cast(summed.values, dtype), summed.indices, summed.dense_shape)


def _with_sums_of_rows(gradient: tf.IndexedSlices) -> tf.IndexedSlices:
    """The gradient with one row for each index: Adam and others would square each of several, not their sum. Local."""
    dtype = gradient.values.dtype
    wide = tf.cast(gradient.values, tf.float32) if dtype == tf.bfloat16 else gradient.values
    unique, positions = tf.unique(gradient.indices)
    total = tf.math.unsorted_segment_sum(wide, positions, tf.size(unique))
    return tf.IndexedSlices(tf.cast(total, dtype), unique, gradient.dense_shape)


def _compression(given: Any) -> str:
    named = _named(given, {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}, "compression")
    return "fp16" if named is hvd.Compression.fp16 else "none"


def _named(value: Any, names: dict[str, Any], what: str) -> Any:
    if isinstance(value, str):
        if value not in names:
            raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
        return names[value]
    if not any(value is known or value == known for known in names.values()):
        raise ValueError(f"{what} is {value!r}: it must be one of {', '.join(names)}")
    return value


def _adapt_loss_scale() -> None:
    """Make Keras's LossScaleOptimizer ask all ranks whether gradients are finite, and refuse to be copied.

    Keras checks this rank's gradients alone. A rank whose gradients are not finite then skips the inner `apply` and its
    all-reduce, and the other ranks wait for it for ever. The class itself is changed, not a subclass, since `compile`
    makes a LossScaleOptimizer under mixed_float16. Around any other optimizer it behaves as before.
    """
    loss_scale = keras.optimizers.LossScaleOptimizer
    local_check = loss_scale.check_finite
    if getattr(local_check, "asks_all_ranks", False):
        return

    def check_finite(self: Any, grads: Any) -> Any:
        finite = local_check(self, grads)
        inner = self.inner_optimizer
        return inner.on_all_ranks(finite) if isinstance(inner, _Distributed) else finite

    own_reduce = loss_scale.__reduce__

    def reduce(self: Any) -> Any:
        inner = self.inner_optimizer
        return inner.__reduce__() if isinstance(inner, _Distributed) else own_reduce(self)

    check_finite.asks_all_ranks = True  # type: ignore[attr-defined]
    loss_scale.check_finite = check_finite
    loss_scale.__reduce__ = reduce
