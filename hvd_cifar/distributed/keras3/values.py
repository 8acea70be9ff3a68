"""Keras 3's variables as arguments of Horovod's functions, which take TensorFlow's; and Keras 2's names.

It is imported while `horovod.tensorflow` is, and must not import that itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import keras
import tensorflow as tf

from .. import keras_classes

# Functions of `horovod.tensorflow` whose first argument is one tensor, or a list of them.
GROUPED = ("allreduce", "allgather", "reducescatter")
TAKE_TENSORS = (*GROUPED, *(f"grouped_{name}" for name in GROUPED), "broadcast", "alltoall")
GATHER = ("allgather", "grouped_allgather", "alltoall")  # those in which a rank cannot take part once it has joined

_gathers_in_graphs: set[str] = set()


def complete(horovod: dict[str, Any]) -> None:
    """Make the names of the module `horovod.tensorflow` serve Keras 3, and Keras 3's classes have Keras 2's names."""
    keras_classes.change()
    _give_names_of_keras_2()
    for name in TAKE_TENSORS:
        horovod[name] = _with_tensors(horovod[name])
    horovod["join"] = _without_gathers(horovod["join"])


def to_broadcast(variables: Iterable[Any]) -> list[Any]:
    """TensorFlow's variables inside Keras's, without the states of random generators, which Keras 2 does not list.

    Ranks with one state would drop the same units.
    """
    own = [v for v in variables if getattr(v, "name", "") != "seed_generator_state"]
    return [v._value if isinstance(v, keras.Variable) else v for v in own]


@tf.autograph.experimental.do_not_convert
def broadcast_variables(variables: Iterable[Any], root_rank: int, process_set: Any) -> None:
    """Horovod's, by the order of variables: a model that one rank has loaded has other names than one made by `fit`."""
    from .. import collectives

    collectives.broadcast_variables(to_broadcast(variables), root_rank, process_set)


def _with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ in GATHER and not tf.executing_eagerly():
            _gathers_in_graphs.add(function.__name__)
        several = isinstance(value, (list, tuple))
        values = value if several else [value]
        tensors = [tf.convert_to_tensor(v) if isinstance(v, keras.Variable) else v for v in values]
        return function(tensors if several else tensors[0], *args, **kwargs)

    return call


def _without_gathers(join: Callable[[], int]) -> Callable[[], int]:
    @wraps(join)
    def call() -> int:
        if _gathers_in_graphs:
            raise RuntimeError(
                f"hvd.join() after {', '.join(sorted(_gathers_in_graphs))} in a step: a rank that still steps would "
                "hang; give the optimizer sparse_as_dense=True and no fixed_order, or leave join out"
            )
        return join()

    return call


class CallableList(list[Any]):
    """A list that returns itself when it is called: `optimizer.variables` as a property, and as Keras 2's method."""

    def __call__(self) -> CallableList:
        """The list."""
        return self


def _callable(variables: Callable[[Any], list[Any]]) -> property:
    return property(lambda self: CallableList(variables(self)))


def _give_names_of_keras_2() -> None:
    """Give Keras 3's classes what programs for Keras 2, and Horovod's own code, use. A second call does nothing."""
    if hasattr(keras.Variable, "ref"):
        return
    # Of the variable inside, not of what an autocast scope makes of it.
    keras.Variable.ref = lambda self: self._value.ref()
    optimizer, loss_scale = keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer
    for kind in (optimizer, loss_scale):
        kind.variables = _callable(kind.variables.fget)
    optimizer.lr = property(lambda self: self.learning_rate, lambda self, rate: setattr(self, "learning_rate", rate))
    # Keras's own fails for its variables, whose types are names.
    tf.keras.backend.set_value = lambda variable, value: variable.assign(value)
    loss_scale.register_local_var = lambda self, variable: self.inner_optimizer.register_local_var(variable)
    # Where Keras defines it: saving asks whether a model has one of its own.
    home = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
    own_compile = home.compile

    def compile(self: Any, *args: Any, experimental_run_tf_function: Any = None, **kwargs: Any) -> None:
        """As Keras's; the argument that Horovod's documentation asks for has no effect."""
        own_compile(self, *args, **kwargs)

    home.compile = compile
