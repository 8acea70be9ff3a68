"""`DistributedOptimizer`: any Keras 3 optimizer, with gradients reduced over all ranks before they are applied.

In Keras 3 all gradients go through `Optimizer.apply`, in `fit` and in a user's own loop: this module overrides it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from . import keras_classes
from .collectives import in_graph
from .keras_classes import inner_of as inner_of  # re-exported
from .keras_classes import put_in_front
from .reduction import Reduction, all_reduce, name_of

OptimizerT = TypeVar("OptimizerT", bound=keras.optimizers.Optimizer)
Watch = Callable[[Sequence[Any]], "bool | None"]
_Optimizer: Any = object  # the optimizer's own class comes after `Distributed`


class Distributed(_Optimizer):
    """The class that `DistributedOptimizer` puts in front of the optimizer's own.

    Keras does not track the sums of several passes: a saved model or checkpoint fits the plain optimizer.
    """

    _reduction: Reduction
    _watch: Watch | None = None
    built: bool
    _pass_sums: list[keras.Variable]
    _passes_done: keras.Variable

    def build(self, variables: Sequence[Any]) -> None:
        """As the optimizer's own."""
        super().build(variables)
        self._make_pass_sums()

    def __reduce__(self) -> Any:
        # By Keras's own a copy would be a plain optimizer: each rank would train alone, without an error.
        raise TypeError(
            "a DistributedOptimizer, or a model with one, cannot be copied or pickled: copy the plain optimizer, or "
            "clone the model, and wrap both"
        )

    def _make_pass_sums(self) -> None:
        if self._reduction.passes == 1 or "_pass_sums" in vars(self):
            return

        def zeros(shape: Any, dtype: Any, name: str) -> keras.Variable:
            # In float32 where the variable is of half precision, in which many terms are no longer added.
            kind = "float32" if dtype in ("bfloat16", "float16") else dtype
            return keras.Variable(initializer="zeros", shape=shape, dtype=kind, trainable=False, name=name)

        sums = [zeros(v.shape, v.dtype, "pass_sum") for v in self._trainable_variables]
        object.__setattr__(self, "_pass_sums", sums)
        object.__setattr__(self, "_passes_done", zeros((), "int64", "passes_done"))

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        """As the optimizer's own, with the reduced gradients. A collective."""
        grads = list(grads)
        variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
        if not grads or self._reduction.passes == 1:
            self._apply_reduced(self._reduction.reduce(grads, variables), variables)
            return
        if not self.built:
            with keras.name_scope(self.name):
                self.build(variables)
            self.built = True
        self._check_variables_are_known(variables)
        self._apply_every_few_passes(grads, variables)

    def _apply_reduced(self, reduced: list[Any], variables: list[Any]) -> None:
        if not (self._watch and self._watch(reduced)):
            super().apply(reduced, variables or None)

    def _apply_every_few_passes(self, grads: list[Any], variables: list[Any]) -> None:
        present = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
        indices = [self._get_variable_index(v) for _, v in present]
        if other := self.__dict__.setdefault("_present", set(indices)) ^ set(indices):
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
            del self.__dict__["_present"]

    def _end_pass(self) -> None:
        """The end of a pass that is not the last of its step."""

    def on_all_ranks(self, condition: Any) -> Any:
        """Whether `condition`, a boolean scalar of each rank, holds on all of them."""
        if self._reduction.is_local:
            return condition
        failed = tf.cast(tf.logical_not(condition), tf.float32)
        name = in_graph("Allreduce", "not_finite")
        return hvd.allreduce(failed, op=hvd.Sum, process_set=self._reduction.process_set, **name) == 0.0


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

    The optimizer itself is changed and returned: its class becomes a subclass of the same name. All its state stays,
    and it saves, loads and checkpoints as before. It cannot be copied or pickled: copy the plain one, and wrap both.
    `keras.models.load_model` returns a plain optimizer: wrap it again.

    It works eagerly, in a `tf.function`, in `model.fit`, and inside a `keras.optimizers.LossScaleOptimizer`: ranks then
    skip a step together when the gradients of any of them are not finite. One that is given here stays outside.

    Call `hvd.init()` first, and wrap before the first step: a graph that was traced with the plain optimizer does not
    reduce, and a graph holds the number of ranks. `fit` traces again, and without XLA, which cannot compile Horovod's
    operations. `hvd.join()` needs dense gradients without `fixed_order`, and raises otherwise.

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
        fixed_order: add gradients in the order of the ranks, in a binary tree: the same terms give the same bits on 1,
            2, 4, ... ranks. Sparse gradients become dense.
        bucket_bytes: size of a message. In a graph a message leaves when backward has computed its gradients. None: all
            gradients leave in one message after backward. Sums differ by rounding only.

    Raises:
        TypeError: where `optimizer` is no Keras 3 optimizer.
        ValueError: where it is already distributed, or an argument is out of its range.
        RuntimeError: where Horovod is not initialised.
    """
    ops, kinds = {"average": hvd.Average, "sum": hvd.Sum}, {"none": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    how = Reduction(
        average=name_of("op", op, ops) == "average",
        compression=name_of("compression", compression, kinds),
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        fixed_order=fixed_order,
        bucket_bytes=bucket_bytes,
    )
    return distribute(optimizer, how)


def distribute(optimizer: OptimizerT, how: Any, kind: type[Distributed] = Distributed) -> OptimizerT:
    """Make an optimizer reduce its gradients as a `Reduction` says. Raises as `DistributedOptimizer` does."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer wraps a Keras 3 optimizer, not {type(optimizer).__name__}")
    inner = inner_of(optimizer)
    if isinstance(inner, Distributed):
        raise ValueError("this optimizer is already distributed: its gradients would be reduced twice")
    if not hvd.is_initialized():
        raise RuntimeError("Horovod is not initialised: call hvd.init() before DistributedOptimizer")
    keras_classes.change()
    # Not a copy: a copy shares Keras's trackers, and the original, which does not reduce, could be used by mistake.
    put_in_front(kind, inner, _reduction=how)
    if inner.built:
        inner._make_pass_sums()
    return optimizer


def reduction_of(optimizer: Any) -> Reduction | None:
    """The reduction of a `DistributedOptimizer`, also inside a LossScaleOptimizer; None for any other optimizer."""
    inner = inner_of(optimizer)
    return inner._reduction if isinstance(inner, Distributed) else None


def watch_gradients(optimizer: Any, watch: Watch | None) -> None:
    """Have `watch` called with the reduced gradients before a `DistributedOptimizer` applies them.

    If it returns True, they are not applied. In a graph it is called once, when the graph is traced.
    """
    object.__setattr__(inner_of(optimizer), "_watch", watch)


def apply_and_sum(
    optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any], values: Sequence[Any]
) -> list[Any]:
    """`optimizer.apply`, and the sums of `values` over the ranks that the optimizer reduces over. A collective.

    Values, of the same types and shapes on every rank, travel in the gradients' message if possible: each message costs
    one more synchronisation of the ranks. They need one of their own if gradients are averaged, compressed, not reduced
    at every call, or inspected by a loss scale first. Values are never compressed.

    Raises:
        TypeError: where `optimizer` is no `DistributedOptimizer`, and no LossScaleOptimizer around one.
    """
    how = reduction_of(optimizer)
    if how is None:
        raise TypeError(f"{type(optimizer).__name__} is not a DistributedOptimizer")
    if isinstance(optimizer, Distributed) and how.is_plain_sum:
        reduced = how.reduce([*gradients, *values])
        optimizer._apply_reduced(reduced[: len(gradients)], list(variables))
        return reduced[len(gradients) :]
    # After the gradients: between a step's first message and its last, Horovod's threads poll on cores that compute.
    with tf.control_dependencies([g for g in gradients if g is not None]):
        values = [tf.identity(value) for value in values]
    sums = values if how.is_local else all_reduce(values, hvd.Sum, how)
    optimizer.apply(gradients, variables)
    return sums
