"""A user's net and callbacks that go wrong as the tests of bad numbers need it; `PLAN` says how (JSON)."""

import gc
import json
import math
import os
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvd_cifar
from hvd_cifar.optim.averages import Lookahead, MovingAverage

POISON = tf.Variable(0.0, trainable=False)  # added to this rank's images
MADE: list[Any] = []  # the optimizer


class Poison(keras.layers.Layer):
    def call(self, images: Any) -> Any:
        return images + POISON


def optimizer(learning_rate: float) -> Any:
    MADE.append(keras.optimizers.SGD(learning_rate, momentum=0.9))
    return MADE[-1]


def build(image_shape: tuple[int, ...], classes: int) -> Any:
    POISON.assign(0.0)
    layers: list[Any] = [Poison(), keras.layers.Conv2D(8, 3, strides=4), keras.layers.BatchNormalization()]
    layers += [keras.layers.ReLU(), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential([keras.Input(image_shape), *layers]), hvd_cifar.Recipe(optimizer=optimizer, epochs=1)


class Spoil(hvd_cifar.Callback):
    """A NaN among the last rank's images, at the steps "nan"; before the checkpoint of step "huge", huge weights."""

    def __init__(self) -> None:
        self.plan = json.loads(os.environ["PLAN"])

    def on_step(self, run: Any) -> None:
        POISON.assign(0.0)
        if run.step + 1 in self.plan.get("nan", []) and run.world.rank == run.world.size - 1:
            POISON.assign(math.nan)

    def on_rollback(self, run: Any) -> None:
        POISON.assign(0.0)  # a loss that is looked at in its own step ends it before `on_step`

    def before_checkpoint(self, run: Any) -> None:
        if run.step == self.plan.get("huge"):
            self.plan.pop("huge")
            for variable in run.model.trainable_variables:
                variable.assign(variable * 1e25)


class Undo(hvd_cifar.Callback):
    """Makes the update of the steps "undo", and takes it back: the oracle of --on-nan skip."""

    def __init__(self) -> None:
        self.steps = json.loads(os.environ["PLAN"])["undo"]
        self.kept: list[tuple[Any, Any]] = []

    def on_step(self, run: Any) -> None:
        if run.step in self.steps:
            for variable, value in self.kept:
                variable.assign(value)
        averages = [thing for thing in gc.get_objects() if isinstance(thing, (MovingAverage, Lookahead))]
        variables = [*run.model.variables, *MADE[-1].variables, *(v for a in averages for v in a.variables)]
        # Look-ahead goes by the number of steps.
        self.kept = [(v, np.array(v.numpy())) for v in variables if v.name != "lookahead_steps"]
