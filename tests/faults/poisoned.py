"""A user's net and callback with a NaN among the last rank's images, at the step that `NAN_STEP` names."""

import math
import os
from typing import Any

import keras
import tensorflow as tf

import hvd_cifar

POISON = tf.Variable(0.0, trainable=False)  # added to this rank's images


class Poison(keras.layers.Layer):
    def call(self, images: Any) -> Any:
        return images + POISON


def build(image_shape: tuple[int, ...], classes: int) -> Any:
    POISON.assign(0.0)
    layers = [Poison(), keras.layers.Conv2D(8, 3, strides=4), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers]), hvd_cifar.Recipe(epochs=2)


class Spoil(hvd_cifar.Callback):
    def on_step(self, run: Any) -> None:
        is_here = run.world.rank == run.world.size - 1 and run.step + 1 == int(os.environ["NAN_STEP"])
        POISON.assign(math.nan if is_here else 0.0)
