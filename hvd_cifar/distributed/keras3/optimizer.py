"""`hvd.DistributedOptimizer` and `hvd.load_model` for Keras 3, with Horovod's arguments and Horovod's own reduction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from ..optimizer import Distributed, distribute
from ..reduction import Reduction, with_sums_of_rows

MARK = "_reduced_over_ranks"  # attribute of gradients that `compute_gradients` has reduced


@dataclass(frozen=True, kw_only=True)
class HorovodReduction(Reduction):
    """Gradients reduced by Horovod's own function, but those of local variables."""

    by_horovod: Callable[..., list[Any]]
    scale_local: bool
    local: set[Any] = field(default_factory=set)

    @property
    def is_plain_sum(self) -> bool:
        """Values that are no gradients never travel beside them."""
        return False

    @property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing. An elastic job's graphs must not depend on its present size."""
        return not _is_elastic() and super().is_local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] | None = None) -> list[Any]:
        """Gradients reduced over the ranks; those of local variables divided by the number of ranks. A collective."""
        if variables is None:
            raise ValueError("give the variables beside the gradients: optimizer.apply(gradients, variables)")
        shared = [i for i, v in enumerate(variables) if v.ref() not in self.local]
        reduced = list(gradients)
        totals = self.by_horovod([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, total in zip(shared, totals, strict=True):
            # Keras 2 added rows of one index, which Adam and others would square one by one.
            reduced[i] = with_sums_of_rows(total) if isinstance(total, tf.IndexedSlices) else total
        if self.scale_local and self.local:
            for i in set(range(len(reduced))) - set(shared):
                reduced[i] = self._divided(reduced[i])
        return reduced

    def _divided(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        ranks = hvd.size_op(self.process_set.process_set_id) if _is_elastic() else self.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


def _is_elastic() -> bool:
    return bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))


class _HorovodOptimizer(Distributed):
    """The class that `hvd.DistributedOptimizer` puts in front of the optimizer's own."""

    _reduction: Any
    iterations: keras.Variable

    def register_local_var(self, variable: Any) -> None:
        """From now on the variable's gradient is this rank's own."""
        self._reduction.local.add(variable.ref())

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Gradients, reduced over the ranks unless they are added up over several passes, with their variables.

        Args:
            loss: a tensor of `tape`, or a function without arguments.
        """
        variables = list(var_list() if callable(var_list) else var_list)
        if callable(loss):
            with tf.GradientTape() as tape:
                tape.watch([v.value if isinstance(v, keras.Variable) else v for v in variables])
                loss = loss()
        elif tape is None:
            raise ValueError("give the tape that the loss was computed under: compute_gradients(loss, variables, tape)")
        gradients = tape.gradient(loss, variables)
        if self._reduction.passes == 1:
            gradients = self._reduction.reduce(gradients, variables)
            for gradient in gradients:
                if gradient is not None:
                    setattr(gradient, MARK, True)
        return list(zip(gradients, variables, strict=True))

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> Any:
        return self.compute_gradients(loss, var_list, tape)

    def minimize(self, loss: Any, var_list: Any, tape: Any = None) -> Any:
        """As in Keras 2."""
        return self.apply_gradients(self.compute_gradients(loss, var_list, tape))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
        skip_gradients_aggregation: bool = False,
    ) -> Any:
        """As in Keras 2: gradients that the caller says are reduced already are not reduced again."""
        gradients, variables = zip(*grads_and_vars, strict=True)
        if self._reduction.passes == 1 and (skip_gradients_aggregation or not experimental_aggregate_gradients):
            self._apply_reduced(list(gradients), list(variables))
        else:
            self.apply(gradients, variables)
        return self.iterations

    @tf.autograph.experimental.do_not_convert
    def apply(self, grads: Iterable[Any], trainable_variables: Iterable[Any] | None = None) -> None:
        grads = list(grads)
        if any(g is not None for g in grads) and all(g is None or hasattr(g, MARK) for g in grads):
            self._apply_reduced(grads, None if trainable_variables is None else list(trainable_variables))
        else:
            super().apply(grads, trainable_variables)

    def _end_pass(self) -> None:
        self.iterations.assign_add(1)  # Horovod counts passes


def distributed(
    optimizer: Any,
    name: str | None,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    gradient_predivide_factor: float,
    op: Any,
    backward_passes_per_step: int,
    average_aggregated_gradients: bool,
    groups: Any,
    process_set: Any,
    scale_local_gradients: bool,
) -> Any:
    """Horovod's `create_distributed_optimizer`: the optimizer itself, which from now on reduces its gradients."""
    if keras.config.backend() != "tensorflow":
        raise ValueError(f"Horovod needs Keras on TensorFlow, not on {keras.config.backend()}: set KERAS_BACKEND")
    if gradient_predivide_factor != 1.0 and op != hvd.Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average")
    if backward_passes_per_step < 1:
        raise ValueError(f"backward_passes_per_step is {backward_passes_per_step}: it must be at least 1")
    name = name or f"Distributed{type(optimizer).__name__}"
    settings = (name, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, groups)
    how = HorovodReduction(
        by_horovod=hvd._make_allreduce_grads_fn(*settings, process_set),
        average=op == hvd.Average,
        compression="none" if compression is hvd.Compression.none else "fp16",
        passes=backward_passes_per_step,
        average_passes=average_aggregated_gradients,
        process_set=process_set,
        scale_local=scale_local_gradients,
    )
    return distribute(optimizer, how, _HorovodOptimizer)


def load_model(
    library: Any,
    wrap: Callable[[Any], Any],
    filepath: Any,
    custom_optimizers: Sequence[Any] | None,
    custom_objects: Mapping[str, Any] | None,
) -> Any:
    """A saved model whose optimizer reduces its gradients, with its slots.

    Args:
        library: the module `keras`.
        wrap: from a function that makes an optimizer to one that makes it distributed.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = library.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        wrap(lambda: model.optimizer)()
    return model
