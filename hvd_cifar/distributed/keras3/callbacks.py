"""What Horovod's callbacks and its elastic state need of Keras 3."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


class Backend:
    """What Horovod's callbacks use of Keras 2's backend."""

    constant = staticmethod(tf.constant)

    @staticmethod
    def get_value(variable: Any) -> Any:
        """The present value, as a NumPy array."""
        return variable.numpy()

    @staticmethod
    def set_value(variable: Any, value: Any) -> None:
        """Assign a value."""
        variable.assign(value)


def correct_momentum(optimizer: Any, old_rate: float, new_rate: float) -> bool:
    """Multiply the velocities by new_rate / old_rate; whether the optimizer has any.

    A graph keeps a momentum factor as a constant. The velocity times momentum x new_rate / old_rate, which is Horovod's
    correction of one step, is the corrected velocity times momentum.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if not getattr(inner, "momentum", 0) or not inner.built:
        return hasattr(inner, "momentum")
    velocities = inner.momentums if hasattr(inner, "momentums") else inner._momentums
    for velocity in velocities if old_rate != new_rate and old_rate > 0 else ():
        velocity.assign(velocity * tf.cast(new_rate / old_rate, velocity.dtype))
    return True


def have_weights(model: Any) -> bool:
    """Whether the model has weights on every rank; the optimizer then gets its variables. A collective.

    One rank may have loaded a model whose weights `fit` has yet to build on the others.
    """
    import horovod.tensorflow as hvd

    found = hvd.allreduce(tf.constant(float(bool(model.weights))), op=hvd.Average, name="have_weights") == 1
    if found:
        build(model.optimizer, model)
    return bool(found)


def build(optimizer: Any, model: Any) -> None:
    """Build an optimizer that is not: ranks that join must have the variables of those that train."""
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
