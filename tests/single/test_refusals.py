"""Layers and optimizers that a run refuses, since a step would not use them as they say."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import layers

import hvd_cifar
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import UserError
from hvd_cifar.models import Net
from hvd_cifar.training.work import _refuse_layers, _refuse_optimizer

SHARDS: dict[str, Any] = {"virtual_shards": 2}
SYNC: dict[str, Any] = {"sync_batch_norm": True}
LAYERS = [
    (hvd_cifar.SyncBatchNormalization, SHARDS, "--virtual-shards: the net has the layer sync_batch_norm"),
    (layers.RandomFlip, SHARDS, "--virtual-shards: .* (RandomFlip): its random numbers"),
    (lambda: layers.SpectralNormalization(layers.Conv2D(4, 1)), SHARDS, "--virtual-shards: .* spectral_norm"),
    (lambda: layers.BatchNormalization(renorm=True), SYNC, "--sync-batch-norm: the net has the layer"),
    (lambda: layers.BatchNormalization(synchronized=True), {}, "give --sync-batch-norm"),
]


@pytest.mark.parametrize(("layer", "given", "why"), LAYERS)
def test_options_refuse_layers_that_contradict_them(layer: Any, given: dict[str, Any], why: str) -> None:
    net = Net(keras.Sequential([keras.Input((8, 8, 3)), layer()]), [])
    with pytest.raises(UserError, match=why.replace("(", r"\(").replace(")", r"\)")):
        _refuse_layers(make(TrainSettings, given), net)
    _refuse_layers(make(TrainSettings, SHARDS), Net(keras.Sequential([layers.BatchNormalization()]), []))


SGD = keras.optimizers.SGD
OPTIMIZERS = [
    (lambda: None, "returned NoneType; return a keras.optimizers.Optimizer"),
    (lambda: keras.optimizers.LossScaleOptimizer(SGD(0.02)), "around others; return one plain"),
    (lambda: SGD(keras.optimizers.schedules.CosineDecay(0.02, 9)), "its learning rate is no number"),
    (lambda: SGD(0.02, use_ema=True), "use_ema has no effect here"),
    (lambda: SGD(0.002), "its learning rate is 0.002, and each step sets the recipe's"),
    (lambda: SGD(0.02, clipnorm=2.0), "--clip-norm is given; leave one out"),
]


@pytest.mark.parametrize(("optimizer", "why"), OPTIMIZERS)
def test_a_recipe_s_optimizer_is_refused_where_a_step_would_not_use_it_as_it_says(optimizer: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        _refuse_optimizer(optimizer(), 0.02, clip_norm=1.0)
    _refuse_optimizer(SGD(0.02), 0.02, clip_norm=1.0)
