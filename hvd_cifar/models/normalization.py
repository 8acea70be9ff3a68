"""Layers that normalise: batch norm, and local responses."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.kernels.half import narrow, widen
from hvd_cifar.models.layer import OwnLayer
from hvd_cifar.models.portable import as_keras


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
        self.momentum = momentum
        self.epsilon = epsilon
        self.scale = scale

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
        if training:
            mean, variance = tf.nn.moments(images, axes=[0, 1, 2])
            count = tf.cast(tf.size(images) / tf.shape(images)[-1], images.dtype)
            unbiased = variance * count / tf.maximum(count - 1.0, 1.0)
            step = 1.0 - self.momentum
            self.moving_mean.assign(self.moving_mean + step * (mean - self.moving_mean))
            self.moving_variance.assign(self.moving_variance + step * (unbiased - self.moving_variance))
        else:
            mean, variance = tf.convert_to_tensor(self.moving_mean), tf.convert_to_tensor(self.moving_variance)
        scale = tf.convert_to_tensor(self.gamma) * tf.math.rsqrt(variance + self.epsilon)
        return (images - mean) * scale + tf.convert_to_tensor(self.beta)

    def portable(self, images: Any) -> Any:
        """The same by Keras's layer; see `models.portable`."""
        used = [self.gamma] * self.scale + [self.beta, self.moving_mean, self.moving_variance]
        return as_keras(keras.layers.BatchNormalization, self, images, [variable.numpy() for variable in used])


@keras.saving.register_keras_serializable("hvd_cifar")
class LocalResponseNormalization(OwnLayer):
    """x / (bias + alpha * sum of x^2 over neighbouring channels)^0.75 (Krizhevsky et al. 2012, section 3.3).

    The constants are those of TensorFlow's CIFAR-10 tutorial; `depth_radius` channels on either side are summed. XLA
    compiles one pass forward and one backward, which take a sixth of the time of TensorFlow's kernel on a CPU.
    TensorFlow's kernel also lacks float64 and bfloat16. Half types are computed in float32: squares overflow float16.
    """

    SETTINGS = ("depth_radius", "bias", "alpha")

    def __init__(self, depth_radius: int = 4, bias: float = 1.0, alpha: float = 0.001 / 9.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.depth_radius = depth_radius
        self.bias = bias
        self.alpha = alpha

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> the same shape and type."""
        return _local_response(images, self.depth_radius, self.bias, self.alpha)

    def portable(self, images: Any) -> Any:
        """The same by `keras.ops`; see `models.portable`."""
        places = np.arange(images.shape[-1])
        near = np.abs(places[:, None] - places) <= self.depth_radius
        sums = keras.ops.matmul(keras.ops.square(images), near.astype(np.float32))
        return images * keras.ops.power(self.bias + self.alpha * sums, -0.75)


# With s = bias + alpha * neighbours(x^2), y = x s^-3/4 has the gradient g s^-3/4 - 3/2 alpha x neighbours(g x s^-7/4).


def _local_response(images: Any, radius: int, bias: float, alpha: float) -> Any:
    @tf.custom_gradient
    def respond(x: Any) -> Any:
        response = _local_response_forward(x, radius, bias, alpha)
        return response, lambda gradient: _local_response_backward(x, gradient, radius, bias, alpha)

    return respond(images)


@tf.function(jit_compile=True, autograph=False)
def _local_response_forward(x: Any, radius: int, bias: float, alpha: float) -> Any:
    wide = widen(x)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    return narrow(wide * root * tf.sqrt(root), x.dtype)


@tf.function(jit_compile=True, autograph=False)
def _local_response_backward(x: Any, gradient: Any, radius: int, bias: float, alpha: float) -> Any:
    wide, upstream = widen(x), widen(gradient)
    root = tf.math.rsqrt(bias + alpha * _neighbours(tf.square(wide), radius))
    power = root * tf.sqrt(root)
    others = _neighbours(upstream * wide * power * tf.square(root), radius)
    return narrow(upstream * power - 1.5 * alpha * wide * others, x.dtype)


def _neighbours(values: Any, radius: int) -> Any:
    channels = values.shape[-1]
    padded = tf.pad(values, [[0, 0]] * (values.shape.rank - 1) + [[radius, radius]])
    return tf.add_n([padded[..., i : i + channels] for i in range(2 * radius + 1)])
