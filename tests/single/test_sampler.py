"""Order and shards: every example once per epoch, whatever the seed, the batch and the number of ranks."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_cifar.data import sampler

counts = st.integers(1, 400)
batches = st.integers(1, 450)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(0, 1000), counts)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, examples: int) -> None:
    assert sorted(sampler.epoch_order(seed, epoch, examples)) == list(range(examples))


def _deals(size: int, micro_batches: int = 1, virtual_shards: int | None = None) -> list[sampler.Deal]:
    return [sampler.Deal(rank, size, micro_batches, virtual_shards) for rank in range(size)]


@given(seeds, st.integers(0, 50), counts, batches, sizes, st.integers(1, 5))
def test_slices_are_the_epoch_without_overlap(
    seed: int, epoch: int, examples: int, batch: int, size: int, micro_batches: int
) -> None:
    whole = sampler.epoch_order(seed, epoch, examples)
    steps = sampler.steps_per_epoch(examples, batch)
    used: list[int] = []
    for step in range(steps):
        part = whole[step * batch : (step + 1) * batch]
        assert len(part) == sampler.examples_in_step(examples, batch, epoch * steps + step)
        for j in range(micro_batches):
            slices = [deal.slice_of(part, j) for deal in _deals(size, micro_batches)]
            assert all(map(len, slices))  # a rank without a slice would make fewer steps than the others
            assert max(map(len, slices)) - min(map(len, slices)) <= 1
            used += [i for s in slices for i in s if i != sampler.PADDING]
        assert sorted(used[step * batch :]) == sorted(part)
    assert sorted(used) == list(range(examples))


@given(counts, st.integers(1, 6), sizes)
def test_micro_batches_are_the_same_for_any_number_of_ranks(length: int, micro_batches: int, size: int) -> None:
    part = np.arange(100, 100 + length)
    for j in range(micro_batches):
        present = [i for deal in _deals(size, micro_batches) for i in deal.slice_of(part, j) if i != sampler.PADDING]
        alone = [i for i in sampler.Deal(0, 1, micro_batches).slice_of(part, j) if i != sampler.PADDING]
        assert sorted(present) == alone == list(part[j * length // micro_batches : (j + 1) * length // micro_batches])


@given(counts, st.integers(0, 4), st.integers(0, 4))
def test_virtual_shards_are_the_same_for_any_number_of_ranks(length: int, of: int, ranks: int) -> None:
    shards, size = 2 ** max(of, ranks), 2 ** min(of, ranks)
    part = np.arange(100, 100 + length)
    alone = sampler.Deal(0, 1, virtual_shards=shards)
    dealt = [deal.slice_of(part, j).tolist() for deal in _deals(size, 1, shards) for j in range(deal.slices)]
    assert dealt == [alone.slice_of(part, j).tolist() for j in range(shards)]  # in this order: neighbours on a rank
    assert sorted(i for s in dealt for i in s if i != sampler.PADDING) == part.tolist()


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 60), sizes)
def test_a_slice_is_what_dataset_shard_takes(length: int, size: int) -> None:
    part = np.arange(100, 100 + length)
    padded = sampler.pad_to_shards(part, size)
    for deal in _deals(size):
        taken = list(tf.data.Dataset.from_tensor_slices(padded).shard(size, deal.rank).as_numpy_iterator())
        assert deal.slice_of(part, 0).tolist() == taken


def test_order_depends_on_seed_and_epoch_and_is_fixed_for_ever() -> None:
    # Written down once: a run that is resumed under another NumPy or a later version of this program goes on.
    assert sampler.epoch_order(0, 0, 10).tolist() == GOLDEN_ORDER
    assert sampler.epoch_order(0, 1, 10).tolist() != GOLDEN_ORDER
    assert sampler.epoch_order(1, 0, 10).tolist() != GOLDEN_ORDER


def test_positions_are_uniform() -> None:
    """Example 0's place over 4,000 epochs: chi-square over 10 bins, 9 degrees of freedom, far under p = 1e-6."""
    places = [int(np.flatnonzero(sampler.epoch_order(7, epoch, 50) == 0)[0]) for epoch in range(4000)]
    seen = np.bincount(np.asarray(places) // 5, minlength=10)
    assert ((seen - 400) ** 2 / 400).sum() < 45


GOLDEN_ORDER = [0, 1, 9, 4, 2, 3, 6, 8, 7, 5]
