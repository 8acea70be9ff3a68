"""The project's nets by name, for programs and tests that need no run."""

from __future__ import annotations

from functools import partial
from typing import Any

from hvd_cifar import models
from hvd_cifar.models import Model, Net, resnet
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.training.plan import set_precision

# The smallest ResNet, which `train` knows as benchmarks.nets:resnet8.
MODELS = {**models.BUILT_IN, "resnet8": Model("resnet8", partial(resnet.build, depth=8), resnet.RECIPE)}


def resnet8(image_shape: tuple[int, int, int], classes: int) -> tuple[Any, Recipe]:
    """The smallest ResNet, with the recipe of all: see `models.resnet.build`."""
    return MODELS["resnet8"].build(image_shape, classes), resnet.RECIPE


def recipe_of(name: str) -> Recipe:
    """The recipe of a net."""
    recipe = MODELS[name].recipe
    assert recipe is not None
    return recipe


def build(name: str, side: int = 32, precision: str = "float32", seed: int = 0, classes: int = 10) -> Net:
    """A freshly initialised net for side x side pixels of three channels."""
    set_precision(precision, seed)
    return models.build(MODELS[name], (side, side, 3), classes)
