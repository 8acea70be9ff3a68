"""Nets, data and a pace for jobs of tests: graphs are built in a moment, and a step leaves the cores free."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np

import hvd_cifar


def build(image_shape: tuple[int, int, int], classes: int) -> Any:
    """Kernels of convolutions and dense layers, moving averages; gradients of 0.8 MB, which are no short message."""
    layers = [keras.layers.Conv2D(16, 3, strides=4, padding="same"), keras.layers.ReLU(), keras.layers.Flatten()]
    layers += [keras.layers.Dense(200), keras.layers.ReLU(), keras.layers.Dense(classes)]
    recipe = hvd_cifar.Recipe(epochs=1000, learning_rate=0.01, ema_decay=0.99)
    return keras.Sequential([keras.Input(image_shape), *layers]), recipe


def build_of_any_size(image_shape: tuple[int, int, int], classes: int) -> Any:
    """A net for images of any size, with batch norm, two sizes of image, look-ahead and test-time views."""
    layers = [keras.layers.Conv2D(8, 3, strides=2, use_bias=False), keras.layers.BatchNormalization()]
    layers += [keras.layers.ReLU(), keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(classes)]
    recipe = hvd_cifar.Recipe(
        epochs=1, learning_rate=0.05, image_scales=(0.5, 1), lookahead=True, test_time_augmentation=True
    )
    return keras.Sequential([keras.Input((None, None, image_shape[2])), *layers]), recipe


EXAMPLES = 263  # a prime


def few() -> hvd_cifar.Dataset:
    """263 examples to train on, and as many to test on, whose mean colour tells the class."""
    draw = np.random.default_rng(5)
    labels = draw.integers(0, 10, (2, EXAMPLES))
    images = draw.integers(0, 100, (2, EXAMPLES, 32, 32, 3)) + 15 * labels[..., None, None, None]
    train, test = zip(images.astype(np.uint8), labels, strict=True)
    return hvd_cifar.Dataset.from_arrays(*train, *test)


GREY = 42  # in batches of 8: the sixth step has 2 examples, and the third rank none


def net_with(*layers: Any, recipe: Any = None) -> Any:
    """A function that builds a net with these kinds of layers after its convolution, each made anew."""

    def build(image_shape: tuple[int, int, int], classes: int) -> Any:
        x = images = keras.Input(image_shape)
        x = keras.layers.Conv2D(4, 3)(x)
        for make in layers:
            x = make()(x)
        x = keras.layers.Flatten()(keras.layers.ReLU()(x))
        net = keras.Model(images, keras.layers.Dense(classes)(x))
        return (net, recipe) if recipe else net

    return build


def train_on_grey(run_dir: str, build: Any, callbacks: Any = (), **settings: Any) -> dict[str, Any]:
    """Train on `GREY` examples of three classes."""
    images = np.random.default_rng(3).integers(0, 255, (GREY, 6, 6, 1), dtype=np.uint8)
    labels = np.arange(GREY) % 3
    data = hvd_cifar.Dataset.from_arrays(images, labels, images[:9], labels[:9])
    common = {"global_batch_size": 8, "epochs": 3, "precision": "float64", "eval_every": 0, "log_every": 1}
    numbers = {"warmup_epochs": 0, "learning_rate_factor": 1, **settings.pop("set", {})}
    common |= {"learning_rate": 0.02, "set": numbers, "run_dir": run_dir, **settings}
    return hvd_cifar.train(build, data, callbacks=callbacks, **common)


class Pace(hvd_cifar.Callback):
    """At most 50 steps a second, so that what a test does meets a job in the middle on any machine."""

    seconds = 0.02

    def on_step(self, run: Any) -> None:
        """Wait."""
        time.sleep(self.seconds)
