"""Seeds of random layers, by rank."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from hvd_cifar.training.random_layers import random_layers, separate


class Dropping(keras.layers.Layer):
    """A layer with a generator that others may have also."""

    def __init__(self, generator: Any) -> None:
        super().__init__()
        self.generator = generator

    def call(self, inputs: Any) -> Any:
        return inputs


@pytest.mark.parametrize("holders", [1, 2, 3])
def test_ranks_have_other_seeds_however_many_layers_share_a_generator(holders: int) -> None:
    seeds = []
    for rank in range(3):
        generator = keras.random.SeedGenerator(7)
        separate(keras.Sequential([keras.Input((2,)), *(Dropping(generator) for _ in range(holders))]), rank)
        seeds.append(generator.state.numpy().tolist()[0])
    assert seeds[0] == 7 and len(set(seeds)) == 3


def test_recurrent_layers_draw_only_with_dropout() -> None:
    for dropout, drawing in ((0.0, 0), (0.5, 1)):
        net = keras.Sequential([keras.Input((3, 2)), keras.layers.LSTM(4, dropout=dropout), keras.layers.Dropout(0.0)])
        assert len(random_layers(net)) == drawing
