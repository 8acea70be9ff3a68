"""Keras 3's variables as arguments of Horovod's functions, which take TensorFlow's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from inspect import signature
from typing import Any

import keras
import tensorflow as tf

from . import keras_2_names

# Functions of `horovod.tensorflow` whose first argument is one tensor, or a list of them.
TAKE_TENSORS = (
    "allreduce",
    "grouped_allreduce",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
)
GATHER = ("allgather", "grouped_allgather", "alltoall")  # those in which a rank cannot take part once it has joined

_gathers_in_graphs: set[str] = set()


def complete(horovod: dict[str, Any]) -> None:
    """Make the names of the module `horovod.tensorflow` serve Keras 3."""
    keras_2_names.give()
    for name in TAKE_TENSORS:
        horovod[name] = _with_tensors(horovod[name])
    horovod["broadcast_variables"] = _in_order(horovod)
    horovod["join"] = _without_gathers(horovod["join"])
    horovod["_make_allreduce_grads_fn"] = _reduce_by(horovod["_make_allreduce_grads_fn"])


def tensor_of(value: Any) -> Any:
    """The present value of a Keras variable; anything else as it is."""
    return tf.convert_to_tensor(value) if isinstance(value, keras.Variable) else value


def to_broadcast(variables: Iterable[Any]) -> list[Any]:
    """TensorFlow's variables inside Keras's, without the states of random generators, which Keras 2 does not list.

    Ranks with one state would drop the same units.
    """
    own = [v for v in variables if getattr(v, "name", "") != "seed_generator_state"]
    return [v._value if isinstance(v, keras.Variable) else v for v in own]


def _in_order(horovod: dict[str, Any]) -> Callable[..., None]:
    """`broadcast_variables` with operations that are named by their order.

    The variables of a model that one rank has loaded have other names than those of a model that another has made.
    """
    whole, broadcast = horovod["broadcast_variables"], horovod["broadcast"]

    @wraps(whole)
    @tf.autograph.experimental.do_not_convert
    def call(
        variables: Any, root_rank: int, process_set: Any = horovod["global_process_set"], inplace: bool = False
    ) -> None:
        if inplace:
            whole(variables, root_rank, process_set, inplace)
            return
        chosen = to_broadcast(variables)

        def assign() -> None:
            for number, variable in enumerate(chosen):
                name = f"broadcast_variables_{number}"
                variable.assign(broadcast(variable, root_rank, name=name, process_set=process_set))

        if tf.executing_eagerly():
            tf.function(assign, autograph=False)()  # all at once
        else:
            assign()

    return call


def _with_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(value: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ in GATHER and not tf.executing_eagerly():
            _gathers_in_graphs.add(function.__name__)
        of_many = isinstance(value, (list, tuple))
        return function([tensor_of(v) for v in value] if of_many else tensor_of(value), *args, **kwargs)

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


def _reduce_by(make: Callable[..., Any]) -> Callable[..., Any]:
    """Horovod's maker of the function that reduces gradients, with groups that do not depend on variables' names.

    Horovod finds a group's variables by their names, of which Keras 3's models have several alike: it would drop all
    gradients but one of a name.
    """

    def make_for(*args: Any, groups: Any = None, process_set: Any, **kwargs: Any) -> Callable[..., Any]:
        single = make(*args, groups=None, process_set=process_set, **kwargs)
        together = make(*args, groups=1, process_set=process_set, **kwargs)

        def reduce(gradients: Sequence[Any], variables: Any = None, use_generic_names: bool = False) -> list[Any]:
            if groups is None:
                return single(list(gradients), None, use_generic_names)
            reduced = list(gradients)
            for members in _groups(gradients, variables, groups):
                # Sparse gradients alone: in a group Horovod takes the shape of the wrong tensor.
                by = single if len(members) == 1 else together
                for i, total in zip(members, by([gradients[i] for i in members], [0] * len(members)), strict=True):
                    reduced[i] = total
            return reduced

        return reduce

    names = signature(make).parameters
    return lambda *args, **kwargs: make_for(**dict(zip(names, args, strict=False)), **kwargs)


def _groups(gradients: Sequence[Any], variables: Any, groups: Any) -> list[list[int]]:
    """Indices of gradients by group: as listed, or in `groups` groups of neighbours; each other one by itself."""
    dense = [i for i, g in enumerate(gradients) if g is not None and not isinstance(g, tf.IndexedSlices)]
    alone = [[i] for i, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
    if isinstance(groups, int):
        count = min(groups, len(dense))
        bounds = [len(dense) * k // max(count, 1) for k in range(count + 1)]
        return [dense[a:b] for a, b in zip(bounds, bounds[1:], strict=False)] + alone
    numbers = {variables[i].ref(): i for i in dense}
    found = [[numbers.pop(v.ref()) for v in group if v.ref() in numbers] for group in groups]
    return [group for group in found if group] + [[i] for i in numbers.values()] + alone
