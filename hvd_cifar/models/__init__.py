"""The nets, by name. They know nothing of ranks, data files or learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
from numpy.typing import NDArray

from hvd_cifar.models import fast, resnet, tutorial
from hvd_cifar.models.normalization import FusedBatchNormalization

CLASSES = 10


class Net(NamedTuple):
    """A model, the side of its images in pixels, what weight decay pulls at, and how images prepare it.

    `prepare` takes some thousands of training images as the model sees test images, float [n, side, side, 3], before
    the first step.
    """

    model: keras.Model
    side: int
    decayed: list[keras.Variable]
    prepare: Callable[[NDArray[np.floating[Any]]], None] = lambda images: None


def build(
    name: str, side: int, precision: str, normalization: type[FusedBatchNormalization] = FusedBatchNormalization
) -> Net:
    """A freshly initialised net for images of side x side pixels.

    Args:
        name: fast, tutorial, or resnet and its depth: resnet20, resnet32, resnet56.
        precision: a Keras dtype policy: float32, float64, mixed_bfloat16, mixed_float16.
        normalization: the layer for batch norm, in nets that have it.

    Raises:
        ValueError: where the name is not known.
    """
    dtype = keras.DTypePolicy(precision)
    if name == "tutorial":
        model = tutorial.build(side, CLASSES, dtype)
        return Net(model, side, [v for v in model.trainable_variables if v.path in tutorial.DECAYED])
    if name.startswith("resnet"):
        model = resnet.build(int(name.removeprefix("resnet")), CLASSES, dtype, normalization)
        # Kernels alone: decaying batch norm's scale and all biases towards zero has no reason (Goyal et al. 2017, 5.1).
        return Net(model, side, [v for v in model.trainable_variables if v.path.endswith("kernel")])
    if name == "fast":
        model = fast.build(CLASSES, dtype, normalization)
        decayed = [v for v in model.trainable_variables if v.path == fast.DECAYED]
        return Net(model, side, decayed, lambda images: model.get_layer("whiten").kernel.assign(fast.whitening(images)))
    raise ValueError(f"no model is called {name!r}")
