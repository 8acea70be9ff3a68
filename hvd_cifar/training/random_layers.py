"""Layers that draw random numbers in training: dropout, noise, random flips.

At the start rank 0's variables are broadcast, with the states of random generators. All ranks but rank 0 then change
their seeds, so that ranks do not drop the same units. Checkpoints hold rank 0's states; a resumed run derives the
others from them.
"""

from __future__ import annotations

from typing import Any

import keras

from hvd_cifar.data import sampler
from hvd_cifar.distributed.collectives import random_states


def random_layers(model: keras.Model) -> list[Any]:
    """The layers of a model, and the model itself, if they hold a `keras.random.SeedGenerator`.

    Keras's recurrent layers always hold one, and draw only with dropout.
    """
    return [layer for layer in model._flatten_layers() if layer._seed_generators and not _never_drops(layer)]


def _never_drops(layer: Any) -> bool:
    return getattr(layer, "dropout", None) == 0 and getattr(layer, "recurrent_dropout", None) == 0


def separate(model: keras.Model, rank: int) -> None:
    """Derive this rank's seeds from rank 0's, which all ranks have. Rank 0 keeps its own."""
    for state in random_states(model):
        seed, count = state.numpy().tolist()
        state.assign([seed ^ (int(sampler.key(rank)) >> 32) if rank else seed, count])
