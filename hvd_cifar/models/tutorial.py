"""The convolutional net of TensorFlow's CIFAR-10 tutorial."""

from __future__ import annotations

import keras

from hvd_cifar.models.activation import QuickRelu
from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.normalization import LocalResponseNormalization


def build(side: int, classes: int, dtype: keras.DTypePolicy) -> keras.Model:
    """Two stages of convolution, pooling and local response normalisation, then two local layers and the logits.

    Source: "Advanced Convolutional Neural Networks", TensorFlow 1 tutorial, models/tutorials/image/cifar10/cifar10.py.
    It has 1,068,298 parameters at side 24 and 10 classes.

    Args:
        side: of the square images, in pixels.

    Returns:
        A model from images float [b, side, side, 3] to logits [b, classes], in the policy's compute type.
    """

    def normal(deviation: float) -> keras.initializers.Initializer:
        return keras.initializers.TruncatedNormal(stddev=deviation)

    def constant(value: float) -> keras.initializers.Initializer:
        return keras.initializers.Constant(value)

    def pool(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        return keras.layers.MaxPooling2D(3, strides=2, padding="same", dtype=dtype, name=name)(x)

    def dense(x: keras.KerasTensor, units: int, deviation: float, bias: float, name: str) -> keras.KerasTensor:
        return keras.layers.Dense(
            units, kernel_initializer=normal(deviation), bias_initializer=constant(bias), dtype=dtype, name=name
        )(x)

    def conv(x: keras.KerasTensor, bias: float, name: str) -> keras.KerasTensor:
        x = QuickConv2D(
            64,
            5,
            padding="same",
            kernel_initializer=normal(0.05),
            bias_initializer=constant(bias),
            dtype=dtype,
            name=name,
        )(x)
        return QuickRelu(dtype=dtype, name=f"{name}_relu")(x)

    images = keras.Input((side, side, 3), dtype=dtype.compute_dtype, name="images")
    x = conv(images, 0.0, "conv1")
    x = pool(x, "pool1")
    x = LocalResponseNormalization(dtype=dtype, name="norm1")(x)
    x = conv(x, 0.1, "conv2")
    x = LocalResponseNormalization(dtype=dtype, name="norm2")(x)
    x = pool(x, "pool2")
    x = keras.layers.Flatten(dtype=dtype, name="flatten")(x)
    x = keras.layers.ReLU(dtype=dtype, name="local3_relu")(dense(x, 384, 0.04, 0.1, "local3"))
    x = keras.layers.ReLU(dtype=dtype, name="local4_relu")(dense(x, 192, 0.04, 0.1, "local4"))
    return keras.Model(images, dense(x, classes, 1 / 192, 0.0, "softmax_linear"), name="tutorial")


DECAYED = ("local3/kernel", "local4/kernel")  # the tutorial decays the local layers' weights alone
