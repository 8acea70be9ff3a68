"""Layers that Keras lacks or runs slowly: batch norm, GELU, local responses, a shortcut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import keras
import tensorflow as tf

_present: ContextVar[Any] = ContextVar("present", default=True)


@contextmanager
def examples_present(flag: Any) -> Iterator[None]:
    """Within this, batch norm gathers no statistics where `flag`, a boolean scalar, is false.

    A rank without an example still makes the step, on a stand-in: no convolution takes an empty batch on the CPU.
    """
    token = _present.set(flag)
    try:
        yield
    finally:
        _present.reset(token)


def present() -> Any:
    """The flag of the `examples_present` around this."""
    return _present.get()


class FusedBatchNormalization(keras.layers.Layer):
    """Batch normalisation over [b, h, w, c] by TensorFlow's fused kernel (Ioffe and Szegedy 2015).

    Keras 3's own layer runs as a chain of elementwise operations, which costs a quarter to more than half of a small
    ResNet's speed on a CPU. The statistics are those of this rank's batch. Weights stay float32 under a mixed policy;
    under float64, which the fused kernel does not know, the same is written out.

    Without `scale` gamma stays 1. The moving statistics are `m <- momentum * m + (1 - momentum) * batch`, with the
    unbiased variance.
    """

    def __init__(self, momentum: float = 0.9, epsilon: float = 1e-5, scale: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.momentum = momentum
        self.epsilon = epsilon
        self.scale = scale

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        """Make scale, offset and moving statistics, float [c] each."""
        shape = (input_shape[-1],)
        # autocast=False: the kernel wants float32 statistics and scale even where the images are bfloat16.
        self.gamma = self.add_weight(
            name="gamma", shape=shape, initializer="ones", trainable=self.scale, autocast=False
        )
        self.beta = self.add_weight(name="beta", shape=shape, initializer="zeros", autocast=False)
        self.moving_mean = self.add_weight(
            name="moving_mean", shape=shape, initializer="zeros", trainable=False, autocast=False
        )
        self.moving_variance = self.add_weight(
            name="moving_variance", shape=shape, initializer="ones", trainable=False, autocast=False
        )

    def call(self, images: Any, training: bool = False) -> Any:
        """[b, h, w, c] -> the same shape and type; `training` uses and gathers the batch's statistics."""
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
            self.moving_mean.assign(tf.where(present(), output.batch_mean, mean))
            self.moving_variance.assign(tf.where(present(), output.batch_variance, variance))
        return output.y

    def _written_out(self, images: Any, training: bool) -> Any:
        if training:
            mean, variance = tf.nn.moments(images, axes=[0, 1, 2])
            count = tf.cast(tf.size(images) / tf.shape(images)[-1], images.dtype)
            unbiased = variance * count / tf.maximum(count - 1.0, 1.0)
            step = (1.0 - self.momentum) * tf.cast(present(), images.dtype)
            self.moving_mean.assign(self.moving_mean + step * (mean - self.moving_mean))
            self.moving_variance.assign(self.moving_variance + step * (unbiased - self.moving_variance))
        else:
            mean, variance = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        scale = tf.convert_to_tensor(self.gamma) * tf.math.rsqrt(variance + self.epsilon)
        return (images - mean) * scale + tf.convert_to_tensor(self.beta)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer."""
        own = {"momentum": self.momentum, "epsilon": self.epsilon, "scale": self.scale}
        return {**super().get_config(), **own}


class QuickGelu(keras.layers.Layer):
    """x * sigmoid(1.702 x): within 0.02 of GELU (Hendrycks and Gimpel 2016, section 2).

    Compiled by XLA into one pass forward and one backward: a fifth of the time of `keras.activations.gelu` on a CPU.
    """

    def call(self, images: Any) -> Any:
        """Any shape -> the same shape and type."""
        return _quick_gelu(images)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer; without this it refuses a dtype that is a policy."""
        return dict(super().get_config())


# sigmoid(1.702 x) = (1 + tanh(0.851 x)) / 2, which XLA computes faster. The gradient is written out, and computes tanh
# anew: TensorFlow would have the forward pass write the sigmoid, too, and read it back. Half types are rounded once, at
# the end; XLA rounds them after every operation.


@tf.custom_gradient
def _quick_gelu(x: Any) -> Any:
    return _quick_gelu_forward(x), lambda gradient: _quick_gelu_backward(x, gradient)


@tf.function(jit_compile=True, autograph=False)
def _quick_gelu_forward(x: Any) -> Any:
    wide, tanh = _wide_and_tanh(x)
    return tf.cast(0.5 * wide * (1.0 + tanh), x.dtype)


@tf.function(jit_compile=True, autograph=False)
def _quick_gelu_backward(x: Any, gradient: Any) -> Any:
    wide, tanh = _wide_and_tanh(x)
    return tf.cast(tf.cast(gradient, wide.dtype) * 0.5 * (1.0 + tanh) * (1.0 + 0.851 * wide * (1.0 - tanh)), x.dtype)


def _wide_and_tanh(x: Any) -> tuple[Any, Any]:
    wide = _wide(x)
    return wide, tf.tanh(0.851 * wide)


class LocalResponseNormalization(keras.layers.Layer):
    """x / (bias + alpha * sum of x^2 over neighbouring channels)^0.75 (Krizhevsky et al. 2012, section 3.3).

    The constants are those of TensorFlow's CIFAR-10 tutorial; `depth_radius` channels on either side are summed.
    Compiled by XLA into one pass forward and one backward: on a CPU that is a sixth of the time of TensorFlow's kernel,
    and serves every type, where the kernel lacks float64 and bfloat16. Under a mixed policy it is computed in float32:
    squares overflow float16.
    """

    def __init__(self, depth_radius: int = 4, bias: float = 1.0, alpha: float = 0.001 / 9.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth_radius = depth_radius
        self.bias = bias
        self.alpha = alpha

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> the same shape and type."""
        return _local_response(images, self.depth_radius, self.bias, self.alpha)

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        return input_shape

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer."""
        own = {"depth_radius": self.depth_radius, "bias": self.bias, "alpha": self.alpha}
        return {**super().get_config(), **own}


# With s = bias + alpha * neighbours(x^2), y = x s^-3/4 has the gradient g s^-3/4 - 3/2 alpha x neighbours(g x s^-7/4).


def _local_response(images: Any, radius: int, bias: float, alpha: float) -> Any:
    @tf.custom_gradient
    def respond(x: Any) -> Any:
        return (
            _local_response_forward(x, radius, bias, alpha),
            lambda gradient: _local_response_backward(x, gradient, radius, bias, alpha),
        )

    return respond(images)


@tf.function(jit_compile=True, autograph=False)
def _local_response_forward(x: Any, radius: int, bias: float, alpha: float) -> Any:
    wide = _wide(x)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    return tf.cast(wide * root * tf.sqrt(root), x.dtype)


@tf.function(jit_compile=True, autograph=False)
def _local_response_backward(x: Any, gradient: Any, radius: int, bias: float, alpha: float) -> Any:
    wide, upstream = _wide(x), _wide(gradient)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    power = root * tf.sqrt(root)
    others = _neighbours(upstream * wide * power * tf.square(root), radius)
    return tf.cast(upstream * power - 1.5 * alpha * wide * others, x.dtype)


def _neighbours(values: Any, radius: int) -> Any:
    channels = values.shape[-1]
    padded = tf.pad(values, [[0, 0]] * (values.shape.rank - 1) + [[radius, radius]])
    return tf.add_n([padded[..., i : i + channels] for i in range(2 * radius + 1)])


def _wide(x: Any) -> Any:
    return tf.cast(x, tf.float32) if x.dtype.size < 4 else x


class PadShortcut(keras.layers.Layer):
    """The parameter-free shortcut between stages: every second pixel, new channels zero (He et al. 2015, option A)."""

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / 2, w / 2, filters], rounded up."""
        missing = self.filters - images.shape[-1]
        # Pooling over one pixel is the same as images[:, ::2, ::2], in a tenth of the time on a CPU, gradient and all.
        halved = tf.nn.avg_pool2d(images, ksize=1, strides=2, padding="VALID")
        return tf.pad(halved, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """What Keras asks for while it builds a model."""
        batch, height, width, _ = input_shape
        halved = [None if side is None else (side + 1) // 2 for side in (height, width)]
        return (batch, halved[0], halved[1], self.filters)

    def get_config(self) -> dict[str, Any]:
        """What Keras saves of the layer."""
        return {**super().get_config(), "filters": self.filters}
