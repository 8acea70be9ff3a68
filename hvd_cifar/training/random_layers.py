"""Layers that draw random numbers in training: dropout, noise, random flips.

At its start every rank gets rank 0's variables, the states of the random generators included. Ranks must not drop the
same units of their examples, so all ranks but rank 0 change their seeds. Checkpoints hold rank 0's states: a resumed
run goes on with the same numbers.
"""

from __future__ import annotations

from typing import Any

import keras

from hvd_cifar.data import sampler


def random_layers(model: keras.Model) -> list[Any]:
    """The layers of a model, and the model itself, that hold a `keras.random.SeedGenerator`."""
    return [layer for layer in model._flatten_layers() if layer._seed_generators]


def random_states(model: keras.Model) -> list[keras.Variable]:
    """The states of a model's random generators, int64 [2] each: seed and count. Seeds differ from rank to rank."""
    return [generator.state for layer in random_layers(model) for generator in layer._seed_generators]


def separate(model: keras.Model, rank: int) -> None:
    """Change this rank's seeds, which are rank 0's before; rank 0 keeps its own."""
    for state in random_states(model):
        seed, count = state.numpy().tolist()
        state.assign([seed ^ (int(sampler.key(rank)) >> 32) if rank else seed, count])
