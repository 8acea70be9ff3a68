"""Activations that XLA compiles into one pass forward and one backward."""

from __future__ import annotations

import functools
import operator
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.kernels.half import narrow, widen
from hvd_cifar.models.layer import OwnLayer


@keras.saving.register_keras_serializable("hvd_cifar")
class QuickGelu(OwnLayer):
    """x * sigmoid(1.702 x): within 0.02 of GELU (Hendrycks and Gimpel 2016, section 2).

    One pass each way takes a fifth of the time of `keras.activations.gelu` on a CPU.
    """

    def call(self, inputs: Any) -> Any:
        """Any shape -> the same shape and type."""
        return _gelu(inputs)

    def portable(self, inputs: Any) -> Any:
        """The same by `keras.ops`; see `models.portable`."""
        return inputs * keras.ops.sigmoid(1.702 * inputs)


# sigmoid(1.702 x) = (1 + tanh(0.851 x)) / 2, which XLA computes faster. The gradient is written out and recomputes the
# tanh: TensorFlow would also store the sigmoid in the forward pass.
@tf.custom_gradient
def _gelu(x: Any) -> tuple[Any, Any]:
    return _gelu_forward(x), lambda upstream: _gelu_backward(x, upstream)


@tf.function(jit_compile=True, autograph=False)
def _gelu_forward(x: Any) -> Any:
    wide = widen(x)
    return narrow(0.5 * wide * (1.0 + tf.tanh(0.851 * wide)), x.dtype)


@tf.function(jit_compile=True, autograph=False)
def _gelu_backward(x: Any, upstream: Any) -> Any:
    wide = widen(x)
    tanh = tf.tanh(0.851 * wide)
    return narrow(widen(upstream) * 0.5 * (1.0 + tanh) * (1.0 + 0.851 * wide * (1.0 - tanh)), x.dtype)


@keras.saving.register_keras_serializable("hvd_cifar")
class QuickRelu(OwnLayer):
    """max(x, 0) or max(a + b, 0); with `copies` = n, a tuple of n outputs, one for each consumer.

    A residual block adds before a ReLU, and adds the gradients of its two consumers. TensorFlow's CPU kernels compute
    bfloat16 one element at a time, so there XLA fuses each sum with the ReLU or its gradient. The ReLU of one term
    stays TensorFlow's, which fuses it with the batch norm before it.
    """

    SETTINGS = ("copies",)

    def __init__(self, copies: int = 1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.copies = copies

    def call(self, inputs: Any) -> Any:
        """Any shape, or a list of two of one shape and type -> the same shape and type, or a tuple of `copies`."""
        terms = tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
        if terms[0].dtype == tf.bfloat16 and not tf.config.list_logical_devices("GPU"):
            made = _fused_relu(terms, self.copies)
        else:
            made = (tf.nn.relu(functools.reduce(operator.add, terms)),) * self.copies
        return made if self.copies > 1 else made[0]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of one term, once for each copy."""
        one = input_shape[0] if isinstance(input_shape[0], (list, tuple)) else input_shape
        return (one,) * self.copies if self.copies > 1 else one

    def portable(self, inputs: Any) -> Any:
        """The same by `keras.ops`; see `models.portable`."""
        terms = inputs if isinstance(inputs, (list, tuple)) else (inputs,)
        made = keras.ops.relu(functools.reduce(operator.add, terms))
        return (made,) * self.copies if self.copies > 1 else made


def _fused_relu(terms: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
    @tf.custom_gradient
    def relu(*given: Any) -> Any:
        made = _relu_forward(*given) if len(given) > 1 else tf.nn.relu(*given)

        # The gradient reads the output: TensorFlow fuses batch norm and ReLU only if nothing else reads batch norm's.
        def gradient(*upstream: Any) -> Any:
            return (_relu_backward(made, upstream),) * len(given)

        return tuple(tf.identity(made) for _ in range(copies)), gradient

    return tuple(relu(*terms))


@tf.function(jit_compile=True, autograph=False)
def _relu_forward(*terms: Any) -> Any:
    return narrow(tf.nn.relu(_sum(terms)), terms[0].dtype)


@tf.function(jit_compile=True, autograph=False)
def _relu_backward(made: Any, upstream: tuple[Any, ...]) -> Any:
    total = _sum(upstream) if len(upstream) > 1 else upstream[0]
    return narrow(tf.where(made > 0, total, tf.zeros([], total.dtype)), made.dtype)


def _sum(terms: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.add, map(widen, terms))
