"""Which example is used when: pure functions of (seed, epoch, step), never of the number of ranks.

An epoch is a permutation of the training set; global step t of the epoch uses order[t*B : (t+1)*B], the last one
what is left. How a global batch is then dealt to the ranks is `shard`: that, and only that, knows of ranks.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

PADDING = -1  # stands in a rank's share for "no example": it weighs nothing

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers, element by element, one to one.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). Written
    out because NumPy promises no stable streams from its generators across versions, and a resumed run must not
    depend on NumPy's version.
    """
    with np.errstate(over="ignore"):
        z = values + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def key(*parts: int) -> np.uint64:
    """A 64-bit key of a tuple of non-negative integers, such as (seed, purpose, epoch)."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.array([part], np.uint64))
    return np.uint64(state[0])


def epoch_order(seed: int, epoch: int, examples: int) -> NDArray[np.int64]:
    """The order of an epoch: a permutation, int64 [examples]."""
    draws = mix(np.arange(examples, dtype=np.uint64) ^ key(seed, 0, epoch))
    return np.argsort(draws, kind="stable")


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Global steps in an epoch, the ragged last one counted."""
    return math.ceil(examples / global_batch_size)


def examples_in_step(examples: int, global_batch_size: int, step: int) -> int:
    """Examples of the global batch at a global step (counted from 0 over all epochs)."""
    within = step % steps_per_epoch(examples, global_batch_size)
    return min(global_batch_size, examples - within * global_batch_size)


def pad_to_ranks(batch: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The global batch, lengthened with PADDING to at least `size` entries, so that every rank has a share.

    A rank without a share would make one step fewer than the others, and the others would wait for it for ever.
    """
    return np.pad(batch, (0, max(0, size - len(batch))), constant_values=PADDING)


def shard(batch: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """A rank's share of a global batch: every size-th entry from `rank` on, exactly as `Dataset.shard` takes them."""
    return pad_to_ranks(batch, size)[rank::size]
