"""A user's net and callbacks that go wrong as the tests of bad numbers need it; `PLAN` says how (JSON)."""

import json
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


def optimizer(learning_rate: float) -> Any:
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def build(image_shape: tuple[int, ...], classes: int) -> Any:
    POISON.assign(0.0)
    layers: list[Any] = [Poison(), keras.layers.Conv2D(8, 3, strides=4), keras.layers.BatchNormalization()]
    layers += [keras.layers.ReLU(), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers]), hvd_cifar.Recipe(optimizer=optimizer, epochs=1)


class Spoil(hvd_cifar.Callback):
    """A NaN among the last rank's images, at step "nan", and huge weights before the checkpoint of step "huge"."""

    def __init__(self) -> None:
        self.plan = json.loads(os.environ["PLAN"])

    def on_step(self, run: Any) -> None:
        is_last = run.world.rank == run.world.size - 1
        POISON.assign(math.nan if run.step + 1 == self.plan.get("nan") and is_last else 0.0)

    def on_rollback(self, run: Any) -> None:
        POISON.assign(0.0)  # a loss that is looked at in its own step ends it before `on_step`
        self.plan.pop("nan", None)

    def before_checkpoint(self, run: Any) -> None:
        if run.step == self.plan.get("huge"):
            self.plan.pop("huge")
            for variable in run.model.trainable_variables:
                variable.assign(variable * 1e25)
