"""Which example is used when: pure functions of (seed, epoch, step), never of the number of ranks.

An epoch is a permutation of the training set. Global step t of an epoch uses order[t*B : (t+1)*B]; the last step uses
what is left. `Sharding` divides a global batch among the ranks; nothing else here depends on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

HELD_OUT = 3  # the purpose, in `key`, of drawing the examples that are held out
PADDING = -1  # stands for no example in a list of examples; its weight is 0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Scramble 64-bit integers, element by element, one to one.

    This is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    NumPy's generators may give other numbers in another version, and a resumed run must not depend on that.
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


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, examples: int) -> NDArray[np.int64]:
    """The order of an epoch: a permutation, int64 [examples], read-only."""
    draws = mix(np.arange(examples, dtype=np.uint64) ^ key(seed, 0, epoch))
    order = np.argsort(draws, kind="stable")
    order.setflags(write=False)  # every caller gets the same array
    return order


def spread(count: int, examples: int) -> NDArray[np.int64]:
    """The indices int64 [n] of at most `count` of a number of examples, evenly spaced.

    A folder lists its images class by class: its first ones are of one class.
    """
    count = min(count, examples)
    return np.arange(count, dtype=np.int64) * examples // max(1, count)


def held_out(seed: int, examples: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A training set in two parts, by seed: the examples to train on, and `count` that are held out; both ascending."""
    order = np.argsort(mix(np.arange(examples, dtype=np.uint64) ^ key(seed, HELD_OUT)), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Global steps in an epoch, the ragged last one counted."""
    return math.ceil(examples / global_batch_size)


def examples_in_step(examples: int, global_batch_size: int, step: int) -> int:
    """Examples of the global batch at a global step (counted from 0 over all epochs)."""
    within = step % steps_per_epoch(examples, global_batch_size)
    return min(global_batch_size, examples - within * global_batch_size)


@dataclass(frozen=True)
class Sharding:
    """How each global batch is divided: every rank computes `micro_batches` micro-batches of it, one after the other.

    Attributes:
        rank, size: this rank, and the number of ranks.
        gradient_accumulation: contiguous parts of the global batch; a rank takes its shard of each. The parts do not
            depend on the number of ranks.
        virtual_shards: M shards of the global batch; a rank takes M / size contiguous ones. Then the micro-batches
            do not depend on the number of ranks either. None: each rank is one shard.
    """

    rank: int
    size: int
    gradient_accumulation: int = 1
    virtual_shards: int | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch that each rank computes."""
        return self.virtual_shards // self.size if self.virtual_shards else self.gradient_accumulation

    def micro_batch(self, batch: NDArray[np.int64], j: int) -> NDArray[np.int64]:
        """Micro-batch j of a global batch int64 [n]: the shard that `tf.data.Dataset.shard` takes, never empty."""
        if self.virtual_shards:
            part, index, shards = batch, self.rank * self.micro_batches + j, self.virtual_shards
        else:
            parts = self.gradient_accumulation
            part = batch[j * len(batch) // parts : (j + 1) * len(batch) // parts]
            index, shards = self.rank, self.size
        # A rank without a micro-batch would make one step fewer than the others, which would wait for it for ever.
        missing = max(0, shards - len(part))
        return np.pad(part, (0, missing), constant_values=PADDING)[index::shards]


@dataclass(frozen=True)
class Sampler:
    """The examples that one rank uses, micro-batch by micro-batch.

    Attributes:
        examples: number of examples in the training set.
        global_batch_size: examples in a step, over all ranks.
        seed: of the order, and of the augmentation.
        sharding: this rank's part of each global batch.
    """

    examples: int
    global_batch_size: int
    seed: int
    sharding: Sharding

    def micro_batch(self, number: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch and the examples, int64 [b] with PADDING, of a micro-batch, counted from 0 over all epochs."""
        step, j = divmod(number, self.sharding.micro_batches)
        epoch, within = divmod(step, steps_per_epoch(self.examples, self.global_batch_size))
        first = within * self.global_batch_size
        batch = epoch_order(self.seed, epoch, self.examples)[first : first + self.global_batch_size]
        return epoch, self.sharding.micro_batch(batch, j)
