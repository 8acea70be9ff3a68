"""The convolutional net of TensorFlow's CIFAR-10 tutorial."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras

from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.layers import LocalResponseNormalization, QuickRelu
from hvd_cifar.models.recipe import Batch, Recipe, momentum_sgd
from hvd_cifar.optim.muon import Muon
from hvd_cifar.optim.schedules import Staircase

# The tutorial decays the weights of the local layers alone.
DECAYED = ("local3/kernel", "local4/kernel")

# TensorFlow's CIFAR-10 tutorial, cifar10.py and cifar10_multi_gpu_train.py: a tenth every 350 epochs.
PUBLISHED = Recipe(
    optimizer=keras.optimizers.SGD,
    learning_rate=0.1,
    batch=Batch(largest=1024),
    schedule=Staircase(examples=(350 * 50_000, 700 * 50_000, 1050 * 50_000)),
    epochs=6,  # a first result within minutes on two cores; the tutorial itself trains for 150 and more
    augmentation="tutorial",
    weight_decay=0.004,
    decayed=lambda variable: variable.path in DECAYED,
    ema_decay=0.9999,
)
# With 1,024 examples, the batch of eight ranks, plain SGD at eight times the rate diverges after 60 steps; at four
# times the rate it loses 15 points of accuracy in 12 epochs. Muon loses none (docs/results.md). It leaves out local3:
# with 885,000 weights its updates would double a step's time.
LARGE = replace(
    PUBLISHED,
    optimizer=lambda rate: Muon(rate, 0.95, 0.9, {"": (40.0, 0.0)}, steps=5, dense=["local4"], resets_norms=False),
    learning_rate=0.002,  # of kernels; 0.08 of all other variables
    batch=Batch(reference=1024, power=0.5),
)
# With 256 examples, the batch of two ranks, plain SGD at twice the rate loses 1.3 points of accuracy in 12 epochs, and
# momentum none (docs/results.md). At 0.03 it is 0.8 points better then, and one point worse after 154 epochs.
MEDIUM = replace(PUBLISHED, optimizer=momentum_sgd, learning_rate=0.02, batch=Batch(reference=256), beyond=(256, LARGE))
RECIPE = replace(PUBLISHED, beyond=(128, MEDIUM))


def build(image_shape: tuple[int, int, int], classes: int) -> keras.Model:
    """Two stages of convolution, pooling and local response normalisation, then two local layers and the logits.

    Source: "Advanced Convolutional Neural Networks", TensorFlow 1 tutorial, models/tutorials/image/cifar10/cifar10.py.
    It has 1,068,298 parameters on 24 x 24 pixels of 3 channels and 10 classes.
    """

    def initial(deviation: float, bias: float) -> dict[str, keras.initializers.Initializer]:
        kernel, constant = keras.initializers.TruncatedNormal(stddev=deviation), keras.initializers.Constant(bias)
        return {"kernel_initializer": kernel, "bias_initializer": constant}

    def pool(x: Any, name: str) -> Any:
        return keras.layers.MaxPooling2D(3, strides=2, padding="same", name=name)(x)

    def dense(x: Any, units: int, deviation: float, bias: float, name: str) -> Any:
        return keras.layers.Dense(units, **initial(deviation, bias), name=name)(x)

    def conv(x: Any, bias: float, name: str) -> Any:
        x = QuickConv2D(64, 5, padding="same", **initial(0.05, bias), name=name)(x)
        return QuickRelu(name=f"{name}_relu")(x)

    images = keras.Input(image_shape, name="images")
    x = pool(conv(images, 0.0, "conv1"), "pool1")
    x = LocalResponseNormalization(name="norm1")(x)
    x = LocalResponseNormalization(name="norm2")(conv(x, 0.1, "conv2"))
    x = pool(x, "pool2")
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.ReLU(name="local3_relu")(dense(x, 384, 0.04, 0.1, "local3"))
    x = keras.layers.ReLU(name="local4_relu")(dense(x, 192, 0.04, 0.1, "local4"))
    return keras.Model(images, dense(x, classes, 1 / 192, 0.0, "softmax_linear"), name="tutorial")
