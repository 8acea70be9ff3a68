"""A net without this package: the same function in evaluation, in float32, by Keras's own layers and operations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import keras

from hvd_cifar.errors import UserError

_OF_TRAINING = ("_initializer", "_regularizer", "_constraint")  # settings of layers that evaluation does not need


def portable(model: keras.Model, image_shape: tuple[int, int, int]) -> keras.Model:
    """A copy of a model that `keras.saving.load_model` loads where there is only Keras.

    It maps images float32 [b, *image_shape] to logits float32 [b, classes]. A layer with a method `portable` is
    replaced by what `layer.portable(inputs)` makes of its symbolic inputs: by layers of Keras and `keras.ops`. Keras's
    own layers are copied, also within models in the model. Keras's global dtype policy must be float32.

    Raises:
        UserError: where the model has something else.
    """
    twins: dict[int, Any] = {}  # of layers, which may be called several times
    calls: Counter[int] = Counter()  # of layers with a method `portable`

    def call(layer: Any, *inputs: Any, **options: Any) -> Any:
        if own := _own(layer):
            calls[id(layer)] += 1
            if calls[id(layer)] == 1:
                return own(*inputs)
            # Within a model of its own: the names of a model's layers must differ.
            given = keras.tree.map_structure(lambda t: keras.Input(batch_shape=t.shape, dtype=t.dtype), inputs)
            return keras.Model(given, own(*given), name=f"{layer.name}__call_{calls[id(layer)]}")(inputs)
        if not isinstance(layer, keras.layers.Layer):  # an operation of keras.ops
            return layer(*inputs, **options)
        if getattr(layer, "inputs", None) and isinstance(layer, keras.Model):  # not a subclass with a method call
            flat = keras.tree.flatten(inputs)
            if id(layer) not in twins:
                twins[id(layer)] = _rebuilt(layer, flat, call)
            made = twins[id(layer)](flat)
            return made[0] if len(made) == 1 else made
        if id(layer) in twins:
            return twins[id(layer)](*inputs, **options)
        kind = type(layer)
        if kind.__module__.startswith("hvd_cifar."):  # it only trains otherwise than the class that it derives from
            kind = next(base for base in kind.__mro__ if base.__module__.startswith("keras."))
        if not kind.__module__.startswith("keras.") or kind is keras.layers.Lambda:
            raise UserError(f"its layer {layer.name} ({kind.__name__}) {_REMEDY}")
        twins[id(layer)], outputs = twin_of(kind, layer, inputs, options)
        return outputs

    images = keras.Input(image_shape, name="images")
    made = keras.Model(images, call(model, images), name=model.name)
    if names := list(_foreign(made.get_config())):
        raise UserError(f"its {names[0]} {_REMEDY}")
    return made


def _own(layer: Any) -> Callable[..., Any] | None:
    """A layer's `portable`; None where it is inherited from this package and a subclass computes something else."""
    is_changed = False
    for kind in type(layer).__mro__:
        is_ours = kind.__module__.startswith("hvd_cifar.")
        if "portable" in vars(kind):
            return None if is_ours and is_changed else layer.portable
        is_changed |= not is_ours and bool({"build", "call"} & vars(kind).keys())
    return None


_REMEDY = "is not Keras's own, so TensorFlow alone cannot load it: give its layer a method portable (docs/use.md)"


def twin_of(kind: Any, layer: Any, inputs: Any, options: Any, weights: list[Any] | None = None) -> tuple[Any, Any]:
    """A layer of Keras's class `kind` with the settings and weights of a layer, in float32, and its outputs.

    `inputs`, `options`: of its call, symbolic. `weights`: arrays that it gets instead of the layer's.
    """
    config = {name: value for name, value in layer.get_config().items() if not name.endswith(_OF_TRAINING)}
    try:
        twin = kind.from_config({**config, "dtype": "float32"})
    except (TypeError, ValueError):  # Keras finds no function by this name, or refuses to load one from its code
        raise UserError(f"a function in its layer {layer.name} ({kind.__name__}) {_REMEDY}") from None
    outputs = twin(*inputs, **options)
    twin.set_weights(layer.get_weights() if weights is None else weights)
    finish_all(twin)
    return twin, outputs


def finish_all(layer: keras.layers.Layer) -> None:
    """Have all layers in a layer or model that prepare numbers from their weights, as Normalization, do it again."""
    for part in layer._flatten_layers():
        if callable(getattr(part, "finalize_state", None)):
            part.finalize_state()


def _rebuilt(model: keras.Model, given: list[Any], call: Any) -> keras.Model:
    """A model's graph on inputs like those that are given, with `call(layer, *inputs)` instead of each layer."""
    inputs = [keras.Input(batch_shape=tensor.shape, dtype=tensor.dtype) for tensor in given]
    graph = keras.Model(model.inputs, model.outputs, name=model.name)
    return keras.models.clone_model(graph, inputs, clone_function=lambda layer: layer, call_function=call)


def _foreign(config: Any) -> Iterator[str]:
    """The classes and functions in a saved configuration that are not Keras's."""
    if isinstance(config, dict):
        kind, module = config.get("class_name"), str(config.get("module", "keras"))
        if kind and not module.startswith("keras"):
            yield f"function {config['config']}" if kind == "function" else f"class {kind}"
        config = list(config.values())
    for part in config if isinstance(config, (list, tuple)) else ():
        yield from _foreign(part)
