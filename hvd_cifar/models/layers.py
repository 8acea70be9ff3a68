"""Layers that are faster or steadier than Keras's own; XLA compiles some into one pass forward and one backward."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

_compiled = functools.partial(tf.function, jit_compile=True, autograph=False)


def widen(x: Any) -> Any:
    """Half types as float32, others unchanged: XLA would round a half type after every operation."""
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


def narrow(x: Any, dtype: Any) -> Any:
    """float32 -> `dtype`, rounded to nearest, ties to even: `tf.cast`, in less time for bfloat16 under XLA.

    bfloat16 is the upper half of float32, so rounding is one integer addition. XLA's own cast also handles NaNs whose
    carry would reach the sign bit; arithmetic makes no such NaN.
    """
    return _rounded(x) if dtype == tf.bfloat16 and x.dtype == tf.float32 else tf.cast(x, dtype)


@tf.custom_gradient  # TensorFlow sees none through integers: second derivatives would be zero
def _rounded(x: Any) -> tuple[Any, Any]:
    bits = tf.bitcast(x, tf.uint32)
    half = tf.constant(16, tf.uint32)
    odd = tf.bitwise.bitwise_and(tf.bitwise.right_shift(bits, half), tf.constant(1, tf.uint32))
    rounded = tf.bitwise.right_shift(bits + tf.constant(0x7FFF, tf.uint32) + odd, half)
    return tf.bitcast(tf.cast(rounded, tf.uint16), tf.bfloat16), lambda upstream: tf.cast(upstream, tf.float32)


class OwnLayer(keras.layers.Layer):
    """A layer whose output has the shape of its input, unless it says otherwise."""

    SETTINGS: ClassVar[tuple[str, ...]] = ()  # the constructor's arguments, which are attributes, as Keras saves them
    plain = False  # whether TensorFlow computes it without XLA, so that every program can load the net

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Keras asks for it while it builds a model."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """The layer's settings. Without this method Keras refuses a dtype that is a policy."""
        return {**super().get_config(), **{name: getattr(self, name) for name in self.SETTINGS}}


@keras.saving.register_keras_serializable("hvd_cifar")
class QuickGelu(OwnLayer):
    """x * sigmoid(1.702 x): within 0.02 of GELU (Hendrycks and Gimpel 2016, section 2).

    One pass each way takes a fifth of the time of `keras.activations.gelu` on a CPU.
    """

    def call(self, inputs: Any) -> Any:
        """Any shape -> the same shape and type."""
        return _gelu_forward.python_function(inputs) if self.plain else _gelu(inputs)


# sigmoid(1.702 x) = (1 + tanh(0.851 x)) / 2, which XLA computes faster. The gradient is written out and recomputes the
# tanh: TensorFlow would also store the sigmoid in the forward pass.
@tf.custom_gradient
def _gelu(x: Any) -> tuple[Any, Any]:
    return _gelu_forward(x), lambda upstream: _gelu_backward(x, upstream)


@_compiled
def _gelu_forward(x: Any) -> Any:
    wide = widen(x)
    return narrow(0.5 * wide * (1.0 + tf.tanh(0.851 * wide)), x.dtype)


@_compiled
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


def _fused_relu(terms: tuple[Any, ...], copies: int) -> tuple[Any, ...]:
    @tf.custom_gradient
    def relu(*given: Any) -> Any:
        made = _relu_forward(*given) if len(given) > 1 else tf.nn.relu(*given)

        # The gradient reads the output: TensorFlow fuses batch norm and ReLU only if nothing else reads batch norm's.
        def gradient(*upstream: Any) -> Any:
            return (_relu_backward(made, upstream),) * len(given)

        return tuple(tf.identity(made) for _ in range(copies)), gradient

    return tuple(relu(*terms))


@_compiled
def _relu_forward(*terms: Any) -> Any:
    return narrow(tf.nn.relu(_sum(terms)), terms[0].dtype)


@_compiled
def _relu_backward(made: Any, upstream: tuple[Any, ...]) -> Any:
    total = _sum(upstream) if len(upstream) > 1 else upstream[0]
    return narrow(tf.where(made > 0, total, tf.zeros([], total.dtype)), made.dtype)


def _sum(terms: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.add, map(widen, terms))


@keras.saving.register_keras_serializable("hvd_cifar")
class FusedBatchNormalization(OwnLayer):
    """Batch normalisation over [b, h, w, c] by TensorFlow's fused kernel (Ioffe and Szegedy 2015).

    Keras 3's own layer runs as a chain of elementwise operations, which costs a quarter to more than half of a small
    ResNet's speed on a CPU. The statistics are those of this rank's batch. Weights stay float32 under a mixed policy.
    The fused kernel does not support float64, for which the formulas are written out.

    Without `scale` gamma stays 1. The moving statistics are `m <- momentum * m + (1 - momentum) * batch`, with the
    unbiased variance.
    """

    SETTINGS = ("momentum", "epsilon", "scale")
    averages_unbiased_variances = True  # for `distributed.convert_sync_batch_norm`

    def __init__(self, momentum: float = 0.9, epsilon: float = 1e-5, scale: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum, self.epsilon, self.scale = momentum, epsilon, scale

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make scale, offset and moving statistics, float [c] each."""

        def weight(name: str, value: str, trainable: bool) -> Any:
            # autocast=False: the kernel wants float32 statistics and scale even where the images are bfloat16.
            given = {"initializer": value, "trainable": trainable, "autocast": False}
            return self.add_weight(name=name, shape=(input_shape[-1],), **given)

        self.gamma, self.beta = weight("gamma", "ones", self.scale), weight("beta", "zeros", True)
        self.moving_mean = weight("moving_mean", "zeros", False)
        self.moving_variance = weight("moving_variance", "ones", False)

    def call(self, images: Any, training: bool | None = None) -> Any:
        """[b, h, w, c] -> the same shape and type; `training` uses the batch's statistics, and updates the moving."""
        # As in Keras: a frozen layer uses the moving statistics. The kernel would take None for True.
        training = bool(training and self.trainable)
        if self.compute_dtype == "float64":
            return self._written_out(images, training)
        mean, variance = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        output = tf.raw_ops.FusedBatchNormV3(
            x=images,
            scale=tf.convert_to_tensor(self.gamma),
            offset=tf.convert_to_tensor(self.beta),
            mean=mean,
            variance=variance,
            epsilon=self.epsilon,
            exponential_avg_factor=1.0 - self.momentum,
            is_training=training,
        )
        if training:  # the kernel has already mixed the batch's statistics into the moving ones
            self.moving_mean.assign(output.batch_mean)
            self.moving_variance.assign(output.batch_variance)
        return output.y

    def _written_out(self, images: Any, training: bool) -> Any:
        mean, variance = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        if training:
            mean, variance = tf.nn.moments(images, axes=[0, 1, 2])
            count = tf.cast(tf.size(images) / tf.shape(images)[-1], images.dtype)
            unbiased = variance * count / tf.maximum(count - 1.0, 1.0)
            step = 1.0 - self.momentum
            self.moving_mean.assign(self.moving_mean + step * (mean - self.moving_mean))
            self.moving_variance.assign(self.moving_variance + step * (unbiased - self.moving_variance))
        scale = tf.convert_to_tensor(self.gamma) * tf.math.rsqrt(variance + self.epsilon)
        return (images - mean) * scale + tf.convert_to_tensor(self.beta)


@keras.saving.register_keras_serializable("hvd_cifar")
class LocalResponseNormalization(OwnLayer):
    """x / (bias + alpha * sum of x^2 over neighbouring channels)^0.75 (Krizhevsky et al. 2012, section 3.3).

    The constants are those of TensorFlow's CIFAR-10 tutorial; `depth_radius` channels on either side are summed. It
    takes a sixth of the time of TensorFlow's kernel on a CPU, which also lacks float64 and bfloat16. Half types are
    computed in float32: squares overflow float16.
    """

    SETTINGS = ("depth_radius", "bias", "alpha")

    def __init__(self, depth_radius: int = 4, bias: float = 1.0, alpha: float = 0.001 / 9.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth_radius, self.bias, self.alpha = depth_radius, bias, alpha

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> the same shape and type."""
        constants = (self.depth_radius, self.bias, self.alpha)
        if self.plain:
            return _response.python_function(images, *constants)

        @tf.custom_gradient
        def respond(x: Any) -> Any:
            return _response(x, *constants), lambda gradient: _response_gradient(x, gradient, *constants)

        return respond(images)


# With s = bias + alpha * neighbours(x^2), y = x s^-3/4 has the gradient g s^-3/4 - 3/2 alpha x neighbours(g x s^-7/4).
@_compiled
def _response(x: Any, radius: int, bias: float, alpha: float) -> Any:
    wide = widen(x)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    return narrow(wide * root * tf.sqrt(root), x.dtype)


@_compiled
def _response_gradient(x: Any, gradient: Any, radius: int, bias: float, alpha: float) -> Any:
    wide, upstream = widen(x), widen(gradient)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    power = root * tf.sqrt(root)
    others = _neighbours(upstream * wide * power * tf.square(root), radius)
    return narrow(upstream * power - 1.5 * alpha * wide * others, x.dtype)


def _neighbours(values: Any, radius: int) -> Any:
    channels = values.shape[-1]
    padded = tf.pad(values, [[0, 0]] * (values.shape.rank - 1) + [[radius, radius]])
    return tf.add_n([padded[..., i : i + channels] for i in range(2 * radius + 1)])


# Larger than a convolution's rounding error of values up to 10, smaller than a meaningful difference.
TIE = {tf.float32: 1e-5, tf.float64: 1e-12}


@keras.saving.register_keras_serializable("hvd_cifar")
class SteadyMaxPooling2D(OwnLayer):
    """Max pooling over disjoint windows, in which the first of nearly equal pixels wins, whatever their rounding.

    Rounding decides which of nearly equal pixels is the largest, and so where the gradient goes. Rounding depends on
    the batch, and so on the number of ranks. Within 12 steps of float64, 2 ranks of `fast` differ from one rank by
    9e-10 of a loss with Keras's pooling, and by 1e-14 with this layer. The pixels of a window, in reading order, are
    lowered by 0, 1, 2, ... times `TIE` before they are compared. The maximum is that of the lowered values.

    Half types are too coarse for `TIE`, so their pixels are not lowered, nor are those of images of unknown size.
    `size` is the window's side in pixels; None: the whole image. Incomplete windows at the image's end are dropped.
    """

    SETTINGS = ("size",)

    def __init__(self, size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.size = size

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / size, w / size, c], rounded down; [b, c] for the whole image."""
        if images.dtype in TIE and None not in images.shape[1:3]:
            images -= tf.constant(self._lowering(images.shape[1:3]) * TIE[images.dtype], images.dtype)
        if self.size is None:
            return tf.reduce_max(images, axis=[1, 2])
        return tf.nn.max_pool2d(images, self.size, self.size, "VALID")

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[b, h / size, w / size, c], or [b, c]."""
        batch, height, width, channels = input_shape
        if any(side is not None and side < (self.size or 1) for side in (height, width)):
            raise ValueError(f"an image of {height} x {width} pixels has no window of {self.size} x {self.size}")
        if self.size is None:
            return (batch, channels)
        return (batch, *[side and side // self.size for side in (height, width)], channels)

    def _lowering(self, sides: Sequence[int]) -> NDArray[np.int64]:
        """Each pixel's place in its window, in reading order: [h, w, 1]."""
        height, width = (self.size or side for side in sides)
        return (np.arange(sides[0])[:, None] % height * width + np.arange(sides[1]) % width)[..., None]
