"""Horovod's Keras interface under Keras 3: optimizer, `load_model`, batch norm, and what its callbacks need."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import h5py  # type: ignore[import-untyped]
import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from keras.src.legacy.saving import legacy_h5_format

from ..batch_norm import Synchronized
from ..keras_classes import inner_of
from ..optimizer import Distributed, distribute
from ..reduction import Reduction, with_sums_of_rows

IS_ELASTIC = bool(int(os.environ.get("HOROVOD_ELASTIC", 0)))
MARK = "_reduced_over_ranks"  # attribute of gradients that `compute_gradients` has reduced


@dataclass(frozen=True, kw_only=True)
class HorovodReduction(Reduction):
    """Gradients reduced by Horovod's own function, but those of local variables."""

    by_horovod: Callable[..., list[Any]]
    scale_local: bool
    local: set[Any] = field(default_factory=set)

    @property
    def is_local(self) -> bool:
        """Whether this rank exchanges nothing. An elastic job's graphs must not depend on its present size."""
        return not IS_ELASTIC and super().is_local

    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any] = ()) -> list[Any]:
        """Gradients reduced over the ranks; those of local variables divided by the number of ranks. A collective."""
        if gradients and not variables:
            raise ValueError("give the variables beside the gradients: optimizer.apply(gradients, variables)")
        reduced = list(gradients)
        shared = [i for i, v in enumerate(variables) if v.ref() not in self.local]
        for i in set(range(len(reduced))).difference(shared) if self.scale_local else ():
            reduced[i] = self._divided(reduced[i])
        totals = self.by_horovod([gradients[i] for i in shared], [variables[i] for i in shared])
        for i, total in zip(shared, totals, strict=True):
            # Keras 2 added rows of one index, which Adam and others would square one by one.
            reduced[i] = with_sums_of_rows(total) if isinstance(total, tf.IndexedSlices) else total
        return reduced

    def _divided(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        ranks = hvd.size_op(self.process_set.process_set_id) if IS_ELASTIC else self.process_set.size()
        if isinstance(gradient, tf.IndexedSlices):
            values = gradient.values / tf.cast(ranks, gradient.values.dtype)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(ranks, gradient.dtype)


class _HorovodOptimizer(Distributed):
    """The class that `hvd.DistributedOptimizer` puts in front of the optimizer's own."""

    _reduction: Any
    iterations: keras.Variable

    def register_local_var(self, variable: Any) -> None:
        """From now on the variable's gradient is this rank's own."""
        self._reduction.local.add(variable.ref())

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Gradients, reduced over the ranks unless they are added up over several passes, with their variables.

        `loss`: a tensor of `tape`, or a function without arguments.
        """
        variables = list(var_list() if callable(var_list) else var_list)
        if callable(loss):
            with tf.GradientTape() as tape:
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
            self._apply_reduced(grads, list(trainable_variables or ()))
        else:
            super().apply(grads, trainable_variables)

    def _end_pass(self) -> None:
        self.iterations.assign_add(1)  # Horovod counts passes


def distributed(
    optimizer: Any, name: str | None, passes: int, average_passes: bool, scale_local: bool, **how: Any
) -> Any:
    """The optimizer itself, which from now on reduces its gradients by Horovod's own function, and `how`."""
    if keras.config.backend() != "tensorflow":
        raise ValueError(f"Horovod needs Keras on TensorFlow, not on {keras.config.backend()}: set KERAS_BACKEND")
    if how["gradient_predivide_factor"] != 1.0 and how["op"] != hvd.Average:
        raise ValueError("gradient_predivide_factor goes with op=hvd.Average")
    reduction = HorovodReduction(
        by_horovod=hvd._make_allreduce_grads_fn(name or f"Distributed{type(optimizer).__name__}", **how),
        average=how["op"] == hvd.Average,
        compression="none" if how["compression"] is hvd.Compression.none else "fp16",
        passes=passes,
        average_passes=average_passes,
        process_set=how["process_set"],
        scale_local=scale_local,
    )
    return distribute(optimizer, reduction, _HorovodOptimizer)


def load_model(wrap: Callable[[Any], Any], filepath: Any, custom_optimizers: Any, custom_objects: Any) -> Any:
    """A saved model whose optimizer, wrapped by `wrap`, reduces its gradients, with its slots."""
    known = {kind.__name__: kind for kind in custom_optimizers or ()} | dict(custom_objects or {})
    model = keras.models.load_model(filepath, custom_objects=known)
    if model.optimizer is not None:
        if str(filepath).endswith((".h5", ".hdf5")) and not inner_of(model.optimizer)._trainable_variables:
            _load_slots(model.optimizer, model.trainable_variables, filepath)
        wrap(lambda: model.optimizer)()
    return model


def _load_slots(optimizer: Any, variables: list[Any], filepath: Any) -> None:
    """Load an optimizer's variables from a file of Keras's older format, of which Keras 3 drops the slots."""
    optimizer.built = inner_of(optimizer).built = False
    optimizer.build(variables)
    with h5py.File(filepath) as file:
        values = legacy_h5_format.load_optimizer_weights_from_hdf5_group(file) if "optimizer_weights" in file else []
        if [value.shape for value in values] == [variable.shape for variable in optimizer.variables]:
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value[()])


@keras.saving.register_keras_serializable("horovod")
class SyncBatchNormalization(Synchronized, keras.layers.BatchNormalization):
    """As Horovod's for Keras 2, except that ranks of unequal batches count by their examples, and not alike."""

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)


# What Horovod's callbacks use of Keras 2's backend.
BACKEND = SimpleNamespace(
    constant=tf.constant,
    get_value=lambda variable: variable.numpy(),
    set_value=lambda variable, value: variable.assign(value),
)


def correct_momentum(optimizer: Any, old_rate: float, new_rate: float) -> bool:
    """Multiply the velocities by new_rate / old_rate; whether the optimizer has any.

    Horovod changes the momentum for one step, which has the same effect, but is a constant in Keras 3's graphs.
    """
    inner = inner_of(optimizer)
    if not getattr(inner, "momentum", 0) or not inner.built:
        return hasattr(inner, "momentum")
    velocities = inner.momentums if hasattr(inner, "momentums") else inner._momentums
    for velocity in velocities if old_rate != new_rate and old_rate > 0 else ():
        velocity.assign(velocity * tf.cast(new_rate / old_rate, velocity.dtype))
    return True


def have_weights(model: Any) -> bool:
    """Whether no rank's weights are yet to be built by `fit`; the optimizer then gets its variables. A collective."""
    found = hvd.allreduce(tf.constant(float(bool(model.weights))), op=hvd.Average, name="have_weights") == 1
    if found:
        build(model.optimizer, model)
    return bool(found)


def build(optimizer: Any, model: Any) -> None:
    """Build an optimizer that is not: ranks that join must have the variables of those that train."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
