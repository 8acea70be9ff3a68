"""Collectives of whole values: broadcast, sums over ranks, gathered objects, shared errors; their names; digests.

Every function here is a collective unless its docstring says "Local": all ranks call it, in the same order. In a
process that has not started Horovod those of objects and errors act as on the only rank.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any, Literal, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from . import buckets
from .errors import TrainingError, note

T = TypeVar("T")

ALL_RANKS = hvd.global_process_set
# Size of a message of `broadcast_variables`: large, so that messages are few; limited, since each is in memory twice.
BROADCAST_BYTES = 2**26


def in_graph(kind: Literal["Allreduce", "Allgather", "Broadcast"], role: str) -> dict[str, Any]:
    """The arguments that name a collective of Horovod; none outside of a graph, where ranks meet by order. Local.

    Horovod matches the ranks' operations by their names, by default after what the process has made: ranks that made
    other tensors wait for ever. These count a role's collectives over the outermost graph, the same on every rank;
    scopes are left out, which TensorFlow numbers by other operations.

    Args:
        kind: by it `hvd.elastic.run` knows Horovod's errors. It knows no all-to-alls: they are named as all-gathers.
        role: what the collective is for, such as "gradients".
    """
    if tf.executing_eagerly():
        return {}
    graph = tf.compat.v1.get_default_graph()
    while hasattr(getattr(graph, "outer_graph", None), "outer_graph"):
        graph = graph.outer_graph
    roles = graph.get_collection_ref("hvd_cifar_collectives")
    roles.append(role)
    return {"name": f"Horovod{kind}_{role}_{roles.count(role)}", "ignore_name_scope": True}


def broadcast_variables(
    target: keras.Model | keras.optimizers.Optimizer | Iterable[Any],
    root_rank: int = 0,
    process_set: Any = hvd.global_process_set,
) -> None:
    """Copy the values of one rank's variables to all ranks, bit for bit.

    Of a model the states of random generators stay each rank's own, so that ranks do not drop the same units.

    Args:
        target: a built Keras 3 model (its weights and, if it is compiled and built, its optimizer), a built Keras 3
            optimizer, or Keras or TensorFlow variables; the same on every rank.
        root_rank: the rank that sends its values.
        process_set: the ranks that take part; on any other rank the call does nothing.

    Raises:
        ValueError: where an optimizer, or a layer of a model, is not built. On every rank, where ranks have other
            variables, or layers with other tables beside them (not inside a graph).
    """
    if not process_set.included():
        return
    variables = [v.value if isinstance(v, keras.Variable) else v for v in _variables_of(target)]
    if process_set.size() == 1:
        return
    if tf.executing_eagerly():
        _refuse_differences(target, variables, process_set)
    # As bytes: Horovod cannot send all types, and each message costs a negotiation among all ranks.
    sizes = [(v.shape.num_elements() or 0) * v.dtype.size for v in variables]
    for bucket in buckets.plan(sizes, BROADCAST_BYTES):
        chosen = [variables[i] for i in bucket]
        note(f"broadcast of {len(chosen)} variables from rank {root_rank}")
        name = in_graph("Broadcast", "variables")
        unpack(hvd.broadcast(pack(chosen), root_rank, process_set=process_set, **name), chosen)
    for layer in target._flatten_layers() if isinstance(target, keras.Model) else ():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # it computes with constants that it made of its weights


def _refuse_differences(target: Any, variables: Sequence[Any], process_set: Any) -> None:
    """ValueError, on every rank, where ranks would broadcast other variables, or have other tables beside them."""
    (first, expected), *others = all_gather_object((hvd.rank(), _described(target, variables)), process_set)
    for rank, found in others:
        for its, other in zip_longest(expected, found):
            what, _, remedy = its or other
            value, other_value = (of[1] if of else "missing" for of in (its, other))
            if value != other_value:
                raise ValueError(f"{what} is {value} on rank {first}, and {other_value} on rank {rank}: {remedy}")


def _described(target: Any, variables: Sequence[Any]) -> list[tuple[str, str, str]]:
    """What a rank would broadcast: what it is, the value that ranks must share, and what to do if they do not."""
    found = []
    if optimizer := getattr(target, "optimizer", None):
        remedy = "call model.optimizer.build(model.trainable_variables) on every rank first"
        found.append(("the optimizer", "built" if optimizer.built else "not built", remedy))
    for layer in target._flatten_layers() if isinstance(target, keras.Model) else ():
        # What `adapt` has learnt beside weights is not broadcast.
        learnt = getattr(layer, "bin_boundaries", None)
        if hasattr(layer, "get_vocabulary"):
            learnt = layer.get_vocabulary()
        if learnt is not None:
            table = hashlib.sha256(repr(list(learnt)).encode()).hexdigest()[:16]
            remedy = "adapt it to the same data on every rank, or give its vocabulary or boundaries"
            found.append((f"the table of layer {layer.name}", f"of SHA-256 {table}", remedy))
    remedy = "build the same model and optimizer on every rank"
    of_variables = [(v.name.removesuffix(":0"), f"{v.dtype.name} {tuple(v.shape)}") for v in variables]
    return found + [(f"variable {name}", value, remedy) for name, value in of_variables]


def random_states(model: keras.Model) -> list[keras.Variable]:
    """The states of a model's random generators, int64 [2] each: seed and count. Local."""
    found = [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
    return list({id(state): state for state in found}.values())  # layers may share a generator


def pack(variables: Sequence[Any]) -> Any:
    """The values of TensorFlow's variables of any types as bytes, one after the other: uint8 [n]. Local."""
    return buckets.flat([_bytes_of(v.read_value()) for v in variables])


def unpack(content: Any, variables: Sequence[Any]) -> None:
    """Set variables to the values that `pack` has made of them, bit for bit. Local."""
    pieces = buckets.pieces(content, [_bytes_of(v.read_value()) for v in variables])
    for variable, piece in zip(variables, pieces, strict=True):
        is_bool = variable.dtype == tf.bool
        variable.assign(tf.cast(piece, tf.bool) if is_bool else tf.bitcast(piece, variable.dtype))


def _bytes_of(value: Any) -> Any:
    return tf.cast(value, tf.uint8) if value.dtype == tf.bool else tf.bitcast(value, tf.uint8)


def _variables_of(target: Any) -> list[Any]:
    if isinstance(target, keras.optimizers.Optimizer):
        if not target.built:
            raise ValueError("the optimizer is not built yet: call optimizer.build(model.trainable_variables) first")
        return list(target.variables)
    if isinstance(target, keras.Model):
        for layer in target._flatten_layers():
            if not layer.built and type(layer).build is not keras.layers.Layer.build and not layer._layers:
                raise ValueError(
                    f"the layer {layer.name} is not built yet, so its weights would differ from rank to rank: give "
                    "the model a keras.Input, or call it once; if it is never called, pass a list of variables"
                )
        optimizer = getattr(target, "optimizer", None)
        slots = list(optimizer.variables) if optimizer is not None and optimizer.built else []
        drawn = set(map(id, random_states(target)))
        return [v for v in target.variables if id(v) not in drawn] + slots
    return list(target)


def all_reduce_sums(values: Sequence[float]) -> list[float]:
    """Sums over all ranks, in float64."""
    if hvd.size() == 1:
        return [float(v) for v in values]
    note(f"all-reduce of {len(values)} numbers")
    return [float(v) for v in hvd.allreduce(tf.constant(values, tf.float64), op=hvd.Sum).numpy()]


def all_reduce_in_graph(value: Any, role: str = "values") -> Any:
    """The sum of a tensor over all ranks, as an operation of the step's own graph; differentiable.

    `role`: as for `in_graph`.
    """
    if hvd.size() == 1:
        return value

    @tf.custom_gradient
    def reduce(own: Any) -> tuple[Any, Callable[[Any], Any]]:
        # Each rank's value changes the loss of all ranks. Horovod's own gradient has Horovod's default name.
        total = hvd.allreduce(own, op=hvd.Sum, **in_graph("Allreduce", role))
        return total, lambda upstream: all_reduce_in_graph(upstream, f"{role}_gradient")

    return reduce(value)


def has_started() -> bool:
    """Whether this process is a rank: it has started Horovod. Local."""
    return bool(hvd.is_initialized())


def _is_root() -> bool:
    return not has_started() or hvd.rank() == 0


def barrier(process_set: Any = ALL_RANKS) -> None:
    """Wait until all ranks of a process set have called this. Only members of the set may call it."""
    if process_set.size() > 1:
        note("barrier")
        hvd.allreduce(tf.zeros(1), op=hvd.Sum, process_set=process_set)


def digest(variables: Iterable[keras.Variable]) -> str:
    """SHA-256 of names, types, shapes and bits of variables, in the order given. Local."""
    state = hashlib.sha256()
    for variable in variables:
        value = np.ascontiguousarray(variable.numpy())
        state.update(f"{variable.path} {value.dtype} {value.shape}\n".encode())
        state.update(value.tobytes())
    return state.hexdigest()


def all_gather_object(value: T, process_set: Any = ALL_RANKS) -> list[T]:
    """The objects that the ranks of a process set pass, in the order of the ranks."""
    if not has_started() or process_set.size() == 1:
        return [value]
    mine = np.frombuffer(cloudpickle.dumps(value), np.uint8)
    note(f"all-gather of an object, {len(mine)} bytes here")
    with tf.device("/CPU:0"):
        stream = io.BytesIO(hvd.allgather(tf.constant(mine), process_set=process_set).numpy().tobytes())
    return [pickle.load(stream) for _ in range(process_set.size())]  # each pickle says where it ends


def broadcast_object(value: T) -> T:
    """The object that rank 0 passes."""
    received = all_gather_object(value if _is_root() else None)[0]
    return value if _is_root() else received  # type: ignore[return-value]


def on_every_rank(function: Callable[[], T]) -> T:
    """Call a function that may fail on some ranks only, and fail on all ranks if it fails on any.

    Otherwise the ranks that did not fail would wait for the others in the next collective.

    Raises:
        Exception: on a rank where `function` failed, its own error. On the others, one with the text of the first rank
            that failed: of its class, or a base of it, that sets `crosses_ranks`; else a TrainingError that names rank
            and error.
    """
    failure, told = None, None
    try:
        result = function()
    except Exception as error:  # the other ranks must know of any error
        failure = error
        kind = next((kind for kind in type(error).__mro__ if vars(kind).get("crosses_ranks")), None)
        told = kind, type(error).__name__, str(error)
    found = all_gather_object(told)
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(found):
        if outcome is not None:
            kind, name, text = outcome
            first_line = next(iter(text.splitlines()), "")
            raise kind(text) if kind else TrainingError(f"rank {rank} failed with {name}: {first_line}")
    return result


def host_by_host(function: Callable[[], T]) -> T:
    """As `on_every_rank`, but a host's other ranks wait for its first one, and find the files that it downloads."""
    first = on_every_rank(lambda: [function()] if _is_root() or hvd.local_rank() == 0 else [])
    return on_every_rank(lambda: first[0] if first else function())


def on_root(function: Callable[[], T]) -> T:
    """Call a function on rank 0 alone, and give its result to every rank. Raises as `on_every_rank`."""
    return broadcast_object(on_every_rank(lambda: function() if _is_root() else None))  # type: ignore[return-value]
