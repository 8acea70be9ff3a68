"""What programs for Keras 2 use of Keras's own objects, and Keras 3 has no more. Horovod's code uses it also."""

from __future__ import annotations

from typing import Any

import keras


class CallableList(list[Any]):
    """A list that returns itself when it is called: `optimizer.variables` as a property, and as Keras 2's method."""

    def __call__(self) -> CallableList:
        """The list."""
        return self


def give() -> None:
    """Give Keras 3's classes these names. A second call does nothing."""
    if hasattr(keras.Variable, "ref"):
        return
    # Of the variable inside, not of what an autocast scope makes of it.
    keras.Variable.ref = lambda self: self._value.ref()
    optimizer, loss_scale, model = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer, keras.Model
    for kind in (optimizer, loss_scale):
        kind.variables = property(_callable(kind.variables.fget))
    optimizer.lr = property(lambda self: self.learning_rate, lambda self, rate: setattr(self, "learning_rate", rate))
    loss_scale.register_local_var = lambda self, variable: self.inner_optimizer.register_local_var(variable)
    for name, change in (("compile", _compile), ("make_train_function", _make_train_function)):
        # Where Keras defines it: saving asks whether a model has one of its own.
        home = next(kind for kind in model.__mro__ if name in vars(kind))
        setattr(home, name, change(vars(home)[name]))


def _callable(variables: Any) -> Any:
    return lambda self: CallableList(variables(self))


def _compile(compile_model: Any) -> Any:
    def compile(self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any) -> None:
        """As Keras's; the argument that Horovod's documentation asks for has no effect."""
        compile_model(self, *args, **kwargs)

    return compile


def _make_train_function(make: Any) -> Any:
    def make_train_function(self: Any, force: bool = False) -> Any:
        """As Keras's, without XLA where gradients are reduced; a step that was traced before is traced again."""
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        reduces = hasattr(inner, "on_all_ranks")
        own_step = type(self).train_step is not keras.Model.train_step  # it may reduce by a tape
        if (reduces or own_step) and self.jit_compile:
            self.jit_compile = False  # XLA cannot compile Horovod's operations
        traced = vars(self).get("_reduces_gradients", reduces)
        object.__setattr__(self, "_reduces_gradients", reduces)
        return make(self, force=force or traced != reduces)

    return make_train_function
