"""Which example is used when: pure functions of (seed, epoch, step), never of the number of ranks.

An epoch is a permutation of the training set. Global step t of an epoch uses order[t*B : (t+1)*B]; the last step uses
what is left. `Sampler` divides a global batch among the ranks; nothing else here depends on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

HELD_OUT = 3  # the purpose, in the key of `mix`, of drawing the examples that are held out
PADDING = -1  # stands for no example in a list of examples; its weight is 0

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: Any, *key: int) -> Any:
    """Scramble 64-bit integers, each one to one, by a key of non-negative integers, such as seed, purpose and epoch.

    The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014). NumPy's
    generators may give other numbers in another version, and a resumed run must not depend on that.
    """
    state = np.uint64(0)
    for part in key:
        state = mix(state ^ np.uint64(part))
    with np.errstate(over="ignore"):
        z = (values ^ state if key else values) + _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, examples: int) -> NDArray[np.int64]:
    """The order of an epoch: a permutation, int64 [examples], read-only."""
    order = np.argsort(mix(np.arange(examples, dtype=np.uint64), seed, 0, epoch), kind="stable")
    order.setflags(write=False)  # every caller gets the same array
    return order


def spread(count: int, examples: int) -> NDArray[np.int64]:
    """The indices int64 [n] of at most `count` examples, evenly spaced: a folder's first ones are of one class."""
    count = min(count, examples)
    return np.arange(count, dtype=np.int64) * examples // max(1, count)


def held_out(seed: int, examples: int, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The examples to train on, and `count` that are held out, by seed; both ascending."""
    order = np.argsort(mix(np.arange(examples, dtype=np.uint64), seed, HELD_OUT), kind="stable")
    return np.sort(order[count:]), np.sort(order[:count])


def steps_per_epoch(examples: int, global_batch_size: int) -> int:
    """Global steps in an epoch, the ragged last one counted."""
    return math.ceil(examples / global_batch_size)


def examples_in_step(examples: int, global_batch_size: int, step: int) -> int:
    """Examples of the global batch at a global step (counted from 0 over all epochs)."""
    within = step % steps_per_epoch(examples, global_batch_size)
    return min(global_batch_size, examples - within * global_batch_size)


@dataclass(frozen=True)
class Sampler:
    """The examples that a rank uses: `micro_batches` micro-batches of each global batch, one after the other.

    Attributes:
        seed: of the order, and of the augmentation.
        gradient_accumulation: contiguous parts of the global batch, on any number of ranks; a rank takes its shard of
            each.
        virtual_shards: M shards of the global batch; a rank takes M / size contiguous ones. Then the micro-batches do
            not depend on the number of ranks either. None: each rank is one shard.
    """

    examples: int
    global_batch_size: int
    seed: int
    rank: int
    size: int
    gradient_accumulation: int = 1
    virtual_shards: int | None = None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch that each rank computes."""
        return self.virtual_shards // self.size if self.virtual_shards else self.gradient_accumulation

    def micro_batch(self, number: int) -> tuple[int, NDArray[np.int64]]:
        """The epoch and the examples, int64 [b] with PADDING, of a micro-batch, counted from 0 over all epochs.

        It is the shard that `tf.data.Dataset.shard` takes, but never empty.
        """
        step, j = divmod(number, self.micro_batches)
        epoch, within = divmod(step, math.ceil(self.examples / self.global_batch_size))
        first = within * self.global_batch_size
        part = epoch_order(self.seed, epoch, self.examples)[first : first + self.global_batch_size]
        if self.virtual_shards:
            index, shards = self.rank * self.micro_batches + j, self.virtual_shards
        else:
            parts = self.gradient_accumulation
            part = part[j * len(part) // parts : (j + 1) * len(part) // parts]
            index, shards = self.rank, self.size
        # A rank without a micro-batch would make one step fewer than the others, which would wait for it for ever.
        missing = max(0, shards - len(part))
        return epoch, np.pad(part, (0, missing), constant_values=PADDING)[index::shards]
