"""Which example is used when: pure functions of (seed, epoch, step), never of the number of ranks.

An epoch is a permutation of the training set; global step t of the epoch uses order[t*B : (t+1)*B], the last one
what is left. How a global batch is then dealt to the ranks is `Deal`: that, and only that, knows of ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

PADDING = -1  # stands in a slice for "no example": it weighs nothing

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


@lru_cache(maxsize=64)
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


@dataclass(frozen=True)
class Deal:
    """How global batches are dealt: each rank takes `slices` slices of every one, which it computes in turn.

    Attributes:
        rank, size: this rank and how many there are.
        micro_batches: parts of the global batch, neighbours in its order; a rank takes its shard of each. The parts
            are the same for any number of ranks.
        virtual_shards: M shards of the global batch in place of `size`; a rank takes M / size neighbouring ones. The
            slices themselves are then the same for any number of ranks. None: the ranks are the shards.
    """

    rank: int
    size: int
    micro_batches: int = 1
    virtual_shards: int | None = None

    @property
    def slices(self) -> int:
        """Slices of a global batch that each rank computes."""
        return self.virtual_shards // self.size if self.virtual_shards else self.micro_batches

    def place(self, j: Any, count: Any) -> tuple[Any, Any, Any, int]:
        """Where slice j of a global batch of `count` examples is found; for integers and integer tensors.

        Returns:
            (lo, hi, index, shards): the slice is shard `index` of `shards` of the batch's entries lo .. hi - 1.
        """
        if self.virtual_shards:
            return 0, count, self.rank * self.slices + j, self.virtual_shards
        return j * count // self.micro_batches, (j + 1) * count // self.micro_batches, self.rank, self.size

    def slice_of(self, batch: NDArray[np.int64], j: int) -> NDArray[np.int64]:
        """Slice j of a global batch, padded so that it is not empty. Its examples are those of a `Dataset.shard`."""
        lo, hi, index, shards = self.place(j, len(batch))
        return pad_to_shards(batch[lo:hi], shards)[index::shards]


def pad_to_shards(batch: NDArray[np.int64], shards: int) -> NDArray[np.int64]:
    """A batch, lengthened with PADDING to at least `shards` entries, so that no shard is empty.

    A rank without a shard would make one step fewer than the others, and the others would wait for it for ever.
    """
    missing = np.full(max(0, shards - len(batch)), PADDING, np.int64)
    return np.concatenate([batch, missing]) if len(missing) else batch
