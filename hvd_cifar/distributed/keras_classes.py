"""Changes of Keras's classes and of single objects' behaviour, which keep their state and their saved form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

_PUBLIC = {"keras.layers": keras.layers, "keras.optimizers": keras.optimizers}


def put_in_front(mixin: type, instance: Any, **attributes: Any) -> None:
    """Change the class of an instance to a new subclass of it, whose methods come from `mixin` first.

    All state stays. A saved model holds the name, module and registration of the original class, and so loads without
    this package. `attributes` are those of the new class.
    """
    plain = type(instance)
    name = plain.__name__
    module = next((path for path, room in _PUBLIC.items() if getattr(room, name, None) is plain), plain.__module__)
    names = {"__module__": module, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    made = type(name, (mixin, plain), {**names, **attributes})
    package, separator, registered = keras.saving.get_registered_name(plain).partition(">")
    for kind in (made, plain) if separator else ():  # both get the name; loading takes the last one
        keras.saving.register_keras_serializable(package, registered)(kind)
    # Keras's own __setattr__ would track the class as part of the object's state.
    object.__setattr__(instance, "__class__", made)


def inner_of(optimizer: Any) -> Any:
    """The optimizer inside a LossScaleOptimizer, or `optimizer` itself."""
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


def reduces(optimizer: Any) -> bool:
    """Whether an optimizer is distributed, or around one that is."""
    return hasattr(inner_of(optimizer), "on_all_ranks")


def change() -> None:
    """Make Keras's own LossScaleOptimizer and Model fit for optimizers that reduce. A second call does nothing.

    No subclass would do: `compile` makes a LossScaleOptimizer under mixed_float16, and models are the user's.
    """
    if hasattr(keras.Model, "_traced_with_reduction"):
        return
    loss_scale = keras.optimizers.LossScaleOptimizer
    # Where Keras defines it: saving asks whether a model has one of its own.
    home = next(kind for kind in keras.Model.__mro__ if "make_train_function" in vars(kind))
    own_check, own_make = loss_scale.check_finite, home.make_train_function

    def check_finite(self: Any, grads: Any) -> Any:
        """As Keras's, on all ranks: one that skipped the inner `apply` alone would let the others wait for ever."""
        finite = own_check(self, grads)
        return self.inner_optimizer.on_all_ranks(finite) if reduces(self) else finite

    def make_train_function(self: Any, force: bool = False) -> Any:
        """As Keras's, without XLA where gradients are reduced; a step that was traced before is traced again."""
        before, now = self._traced_with_reduction, reduces(self.optimizer)
        own_step = type(self).train_step is not keras.Model.train_step  # it may reduce by a tape
        if (now or own_step) and self.jit_compile:
            self.jit_compile = False  # XLA cannot compile Horovod's operations
        object.__setattr__(self, "_traced_with_reduction", now)
        return own_make(self, force=force or before not in (None, now))

    keras.Model._traced_with_reduction = None
    loss_scale.check_finite, home.make_train_function = check_finite, make_train_function
    _refuse_copies(loss_scale, lambda optimizer: optimizer)
    _refuse_copies(keras.Model, lambda model: getattr(model, "optimizer", None))


def _refuse_copies(kind: Any, optimizer_of: Callable[[Any], Any]) -> None:
    """Make pickling and copying an error where a copy would have a plain optimizer, which averages nothing."""
    own = kind.__reduce__

    def __reduce__(self: Any) -> Any:
        optimizer = optimizer_of(self)
        return inner_of(optimizer).__reduce__() if reduces(optimizer) else own(self)

    kind.__reduce__ = __reduce__
