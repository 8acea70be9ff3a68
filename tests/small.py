"""A net and a pace for jobs that tests disturb: its graph is built in a moment, and a step leaves the cores free."""

from __future__ import annotations

import time
from typing import Any

import keras

import hvd_cifar


def build(image_shape: tuple[int, int, int], classes: int) -> Any:
    """Kernels of convolutions and dense layers, moving averages; gradients of 0.8 MB, which are no short message."""
    layers = [keras.layers.Conv2D(16, 3, strides=4, padding="same"), keras.layers.ReLU(), keras.layers.Flatten()]
    layers += [keras.layers.Dense(200), keras.layers.ReLU(), keras.layers.Dense(classes)]
    recipe = hvd_cifar.Recipe(epochs=1000, learning_rate=0.01, ema_decay=0.99)
    return keras.Sequential([keras.Input(image_shape), *layers]), recipe


class Pace(hvd_cifar.Callback):
    """At most 50 steps a second, so that what a test does meets a job in the middle on any machine."""

    seconds = 0.02

    def on_step(self, run: Any) -> None:
        """Wait."""
        time.sleep(self.seconds)
