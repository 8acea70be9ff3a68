"""The nets by name, each with its recipe. They know nothing of ranks or data files.

A model is a function `build(image_shape, classes)` that returns a Keras model from float images
[b, height, width, channels] to logits [b, classes], alone or with a `Recipe`. Keras's global dtype policy is the
precision. Built-in and user models take the same path.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras

from hvd_cifar.errors import UserError, cause_of
from hvd_cifar.models import fast, resnet, tutorial
from hvd_cifar.models.recipe import Recipe


@dataclass(frozen=True)
class Model:
    """A net by its name, with its function `build`; `recipe` is None until `with_recipe` has called this."""

    name: str
    build: Callable[[tuple[int, int, int], int], Any]
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Net:
    """A model that was built, and those of its variables that decay."""

    model: keras.Model
    decayed: list[keras.Variable]

    @property
    def parameters(self) -> int:
        """Trainable values."""
        return sum(math.prod(v.shape) for v in self.model.trainable_variables)


BUILT_IN = {
    "fast": Model("fast", fast.build, fast.RECIPE),
    "tutorial": Model("tutorial", tutorial.build, tutorial.RECIPE),
    **{
        f"resnet{depth}": Model(f"resnet{depth}", partial(resnet.build, depth=depth), resnet.RECIPE)
        for depth in (20, 32, 56)
    },
}


def with_recipe(model: Model, image_shape: tuple[int, int, int], classes: int) -> Model:
    """The model with its recipe, which comes before the net, since it names the precision that the net is built in.

    A user's function returns it with a net, which is discarded. Raises UserError where it fails or returns no model.
    """
    if model.recipe is not None:
        return model
    return replace(model, recipe=_built(model, image_shape, classes)[1] or Recipe())


def build(model: Model, image_shape: tuple[int, int, int], classes: int) -> Net:
    """A freshly initialised net, of a model with its recipe, in the precision of Keras's global dtype policy.

    Raises UserError where `build` fails, or what it returns does not make logits from such images.
    """
    made, _ = _built(model, image_shape, classes)
    decayed = (model.recipe or Recipe()).decayed
    return Net(made, [v for v in made.trainable_variables if decayed(v)])


def adapt(net: Net, images: Callable[[], Any]) -> None:
    """Let layers that learn from images before training do so: those with a method `adapt`, as Keras names it.

    A `keras.layers.Normalization` that has learnt already, or was given a mean, stays as it is. UserError where one has
    not, and is behind other layers of the net.

    Args:
        images: called if there are such layers. Returns float [n, height, width, channels], some thousands of training
            images as the net sees test images.
    """
    layers = [layer for layer in net.model._flatten_layers(include_self=False) if callable(getattr(layer, "adapt", 0))]
    learning = [layer for layer in layers if not (isinstance(layer, keras.layers.Normalization) and _has_learnt(layer))]
    seen = images() if learning else None
    for layer in learning:
        if isinstance(layer, keras.layers.Normalization) and not _is_first(layer, net.model):
            raise UserError(f"the layer {layer.name} would learn from other layers' outputs: give it mean and variance")
        layer.adapt(seen)


def finish_all(model: keras.Model) -> None:
    """Have all layers of a model that prepare numbers from their weights, as Normalization, do it again."""
    for layer in model._flatten_layers():
        if callable(getattr(layer, "finalize_state", None)):
            layer.finalize_state()


def _is_first(layer: keras.layers.Layer, model: keras.Model) -> bool:
    """Whether a layer gets the images of a model; False where the model's graph does not show it."""
    try:
        return layer.input is model.inputs[0]
    except (AttributeError, IndexError, TypeError, ValueError):
        return False


def _has_learnt(layer: keras.layers.Normalization) -> bool:
    if layer.input_mean is not None:
        return True
    return layer.built and bool(keras.ops.any(layer.adapt_mean != 0) or keras.ops.any(layer.adapt_variance != 1))


def _built(model: Model, image_shape: tuple[int, int, int], classes: int) -> tuple[keras.Model, Recipe | None]:
    where, recipe = f"--model {model.name}", None
    try:
        made = model.build(image_shape, classes)
        if isinstance(made, tuple) and len(made) == 2:
            made, recipe = made
        if not isinstance(made, keras.Model) or not isinstance(recipe, Recipe | None):
            raise UserError(f"{where}: returned {type(made).__name__}; return a keras.Model, or (keras.Model, Recipe)")
        _refuse_fixed_batch(made, where)
        output = made(keras.Input(image_shape))  # builds it, if it is a subclass of Model
    except UserError:
        raise
    except Exception as failure:
        wanted = f"it is called as build({image_shape}, {classes})"
        raise UserError(f"{where}: {cause_of(failure)}; {wanted}") from failure
    if not isinstance(output, keras.KerasTensor):
        raise UserError(f"{where}: makes a {type(output).__name__} of outputs; make one, the logits (None, {classes})")
    if output.shape != (None, classes):
        raise UserError(f"{where}: makes {output.shape} from images {(None, *image_shape)}; make (None, {classes})")
    if last := _ends_in_probabilities(made):
        raise UserError(f"{where}: its last layer {last} makes probabilities; make logits: leave its activation out")
    if not made.trainable_variables:
        raise UserError(f"{where}: has no trainable variables; return a model that can be trained")
    return made, recipe


def _refuse_fixed_batch(model: keras.Model, where: str) -> None:
    """UserError where a net takes batches of one size only, or keeps a state from one batch to the next."""
    if (shapes := keras.tree.flatten_with_path(getattr(model, "input_shape", None) or ())) and shapes[0][1] is not None:
        raise UserError(
            f"{where}: its keras.Input has a batch of {shapes[0][1]}; batches have several sizes: give "
            "keras.Input(image_shape) without batch_size and batch_shape"
        )
    if stateful := [one.name for one in model._flatten_layers() if getattr(one, "stateful", False) is True]:
        raise UserError(
            f"{where}: its layer {stateful[0]} keeps a state from batch to batch, which no other batch can use; leave "
            "stateful=True out"
        )


def _ends_in_probabilities(model: keras.Model) -> str:
    """The name of a last layer that ends in softmax or sigmoid; "" where there is none, or the last layer is unknown.

    The loss applies softmax to logits. On probabilities it would train badly, without an error.
    """
    last: Any = model
    while isinstance(last, keras.Model):
        outputs = getattr(last, "outputs", None) or []  # a subclass of Model has none
        last = outputs[0]._keras_history.operation if len(outputs) == 1 else None
    ends = (
        isinstance(last, keras.layers.Softmax)
        or getattr(last, "activation", None) in (keras.activations.softmax, keras.activations.sigmoid)
        or type(last).__name__ in ("Softmax", "Sigmoid")  # operations of keras.ops
    )
    return str(last.name) if ends else ""
