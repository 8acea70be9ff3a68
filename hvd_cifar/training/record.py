"""Gradients and activations of single steps, copied inside the step's graph for `training.summaries`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.models.activation import QuickGelu, QuickRelu

EXAMPLES = 32  # of a micro-batch whose activations are copied: a layer has a million values for 32 CIFAR-10 images
_LAYERS = (
    keras.layers.Activation,
    keras.layers.ELU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ReLU,
    QuickGelu,
    QuickRelu,
)


class Record:
    """Copies the reduced gradients and the activations of the steps that `ask` marks.

    A variable on the host switches copying inside the one graph, so marked and other steps compute the same bits.
    """

    def __init__(self, model: keras.Model) -> None:
        """`model`: built. The step calls `self.model` instead, which also returns activations (`_with_activations`)."""
        self.model, names = _with_activations(model)
        with tf.device("/CPU:0"):  # where the graph reads it without waiting for a GPU
            self._is_asked = tf.Variable(False, trainable=False, name="record")
        self._gradients = [_empty() for _ in model.trainable_variables]
        self._activations = {name: _empty() for name in names}
        self.graph: Any = None  # of the net's forward and backward pass, once it is traced

    def ask(self, asked: bool = True) -> None:
        """Set whether the next steps are copied."""
        self._is_asked.assign(asked)

    def keep_gradients(self, gradients: Sequence[Any]) -> None:
        """To be called in a graph, with the gradients that the optimizer applies."""
        self._keep(self._gradients, lambda: gradients)

    def keep_activations(self, activations: Sequence[Any]) -> None:
        """To be called in a graph, with the outputs of `self.model` after the logits."""
        self.graph = tf.compat.v1.get_default_graph()
        self._keep(list(self._activations.values()), lambda: [output[:EXAMPLES] for output in activations])

    def _keep(self, places: Sequence[Any], tensors: Callable[[], Sequence[Any]]) -> None:
        def copy() -> None:
            for place, tensor in zip(places, tensors(), strict=True):
                place.assign(tf.cast(tensor, tf.float32))

        tf.cond(self._is_asked, copy, lambda: None)

    def take(self) -> tuple[list[NDArray[Any]], dict[str, NDArray[Any]]]:
        """The copied gradients, in the variables' order, and activations, by layer. Copying stops."""
        found = [v.numpy() for v in self._gradients], {name: v.numpy() for name, v in self._activations.items()}
        self.ask(False)
        for variable in (*self._gradients, *self._activations.values()):
            variable.assign([])  # frees memory
        return found


def _empty() -> Any:
    return tf.Variable(tf.zeros([0]), shape=tf.TensorShape(None), trainable=False)


def _with_activations(model: keras.Model) -> tuple[keras.Model, list[str]]:
    """The model with the outputs of its activation layers beside its logits.

    Returns:
        A model of the same layers from images to [logits, *outputs], and a name for each output: the layer's, without
        the suffix `_relu`, as in TensorFlow's tutorial. The logits are also among the outputs. Where the model is not a
        graph of layers, `model` itself and no names.
    """
    if not type(model).__module__.startswith("keras.") or not getattr(model, "inputs", None):
        return model, []  # a user's class, whose `call` may do more than its layers
    logits = model.outputs[0]
    outputs = {layer.name.removesuffix("_relu"): layer.output for layer in model.layers if _is_activation(layer)}
    outputs[model.layers[-1].name] = logits
    ones = [output[0] if isinstance(output, (list, tuple)) else output for output in outputs.values()]
    try:
        return keras.Model(model.inputs[0], [logits, *ones], name=model.name, dtype=model.dtype_policy), list(outputs)
    except ValueError:  # a layer that is part of another net first
        return model, []


def _is_activation(layer: keras.layers.Layer) -> bool:
    linear = keras.activations.linear
    return isinstance(layer, _LAYERS) or getattr(layer, "activation", linear) not in (None, linear)
