"""`DistributedOptimizer`: any Keras 3 optimizer, with gradients reduced over all ranks before they are applied.

Horovod's own wrapper overrides hooks of Keras 2 (`get_gradients`, `_compute_gradients`, `_aggregate_gradients`), none
of which Keras 3 calls. In Keras 3 all gradients go through `Optimizer.apply`, in `fit` and in a user's own loop. This
module overrides that method.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from . import loss_scale, names, reduction
from .reduction import Reduction
from .subclass import put_in_front

OptimizerT = TypeVar("OptimizerT", bound=keras.optimizers.Optimizer)


class Distributed:
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
        """As the optimizer's own."""
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
        """As the optimizer's own, with the reduced gradients. A collective."""
        grads = list(grads)
        variables = None if trainable_variables is None else list(trainable_variables)
        if not grads or self._reduction.passes == 1:
            known = self._trainable_variables if variables is None and self.built else variables
            self._apply_reduced(self._reduction.reduce(grads, known), variables)
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
        reduced = self._reduction.reduce([*grads, *values])
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
        last = self._passes_done.value >= self._reduction.passes
        tf.cond(last, lambda: self._update(sums, [v for _, v in present]), self._end_pass)

    def _update(self, sums: list[Any], variables: list[Any]) -> None:
        divisor = self._reduction.passes if self._reduction.average_passes else 1
        totals = [tf.convert_to_tensor(total) / divisor for total in sums]
        self._apply_reduced(self._reduction.reduce(totals, variables), variables)
        for total in sums:
            total.assign(tf.zeros_like(total.value))
        self._passes_done.assign(0)
        if tf.executing_eagerly():  # a graph, which is traced once, keeps to its variables
            del vars(self)["_present"]

    def _end_pass(self) -> None:
        """The end of a pass that is not the last of its step."""

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

    Arguments are keywords. Those up to `sparse_as_dense` have the names and meanings of Horovod's.

    The optimizer itself is changed and returned: its class becomes a subclass of the same name, which overrides
    `apply`. All its state stays, and it saves, loads and checkpoints as before. It cannot be copied or pickled: copy
    the plain one, and wrap both. `keras.models.load_model` returns a plain optimizer: wrap it again.

    It works eagerly, in a `tf.function`, in `model.fit`, and inside a `keras.optimizers.LossScaleOptimizer`: ranks then
    skip a step together when the gradients of any of them are not finite. One that is given here stays outside.

    Call `hvd.init()` first, and wrap before the first step: a graph that was traced with the plain optimizer does not
    reduce, and a graph holds the number of ranks. For `fit` on a GPU compile with `jit_compile=False`: XLA cannot
    compile Horovod's operations. `hvd.join()` needs dense gradients without `fixed_order`, and raises otherwise.

    Args:
        optimizer: any Keras 3 optimizer, built or not, such as `keras.optimizers.SGD(0.1)`.
        op: "average" or "sum" over ranks (or `hvd.Average`, `hvd.Sum`). "sum" is for ranks that each feed their share
            of a global mean.
        compression: "none" or "fp16" (or Horovod's). fp16 sends half precision, in which the sum is computed: over n
            ranks a mean above 65504 / n becomes infinite. What underflows does not depend on the number of ranks.
        backward_passes_per_step: each rank adds up the gradients of this many calls, which must be of the same
            variables, before they are reduced and applied; `iterations` counts the updates.
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
    fields = reduction.checked(op, compression, backward_passes_per_step, bucket_bytes, process_set)
    fields |= {"average_passes": average_aggregated_gradients, "sparse_as_dense": sparse_as_dense}
    return distribute(optimizer, Reduction(**fields, fixed_order=fixed_order))


def distribute(optimizer: OptimizerT, how: Any, kind: type[Distributed] = Distributed) -> OptimizerT:
    """Make an optimizer reduce its gradients as a `Reduction` says. Raises as `DistributedOptimizer` does."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}")
    inner = inner_of(optimizer)
    if isinstance(inner, Distributed):
        raise ValueError("this optimizer is already distributed: its gradients would be reduced twice")
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    loss_scale.ask_all_ranks()
    # Not a copy: a copy shares Keras's trackers, and the original, which does not reduce, could be used by mistake.
    put_in_front(kind, inner, _reduction=how)
    if inner.built:
        inner._make_pass_sums()
    return optimizer


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def reduction_of(optimizer: Any) -> Reduction | None:
    """The reduction of a `DistributedOptimizer`, also inside a LossScaleOptimizer; None for any other optimizer."""
    inner = inner_of(optimizer)
    return inner._reduction if isinstance(inner, Distributed) else None


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
    how = reduction_of(optimizer)
    if how is None:
        raise TypeError(f"{type(optimizer).__name__} is not a DistributedOptimizer")
    if isinstance(optimizer, Distributed) and how.is_plain_sum:
        return optimizer.apply_and_sum(gradients, variables, values)
    # After the gradients: between a step's first message and its last, Horovod's threads poll on cores that compute.
    with tf.control_dependencies([g for g in gradients if g is not None]):
        values = [tf.identity(value) for value in values]
    sums = how.sums(values)
    optimizer.apply(gradients, variables)
    return sums
