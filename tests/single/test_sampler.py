"""Order and shards: every example once per epoch, whatever the seed, the batch and the number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar.data import sampler

counts = st.integers(1, 400)
batches = st.integers(1, 450)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**63 - 1)


@given(seeds, st.integers(0, 1000), counts)
def test_an_epoch_is_a_permutation(seed: int, epoch: int, examples: int) -> None:
    assert sorted(sampler.epoch_order(seed, epoch, examples)) == list(range(examples))


@given(seeds, counts, counts)
def test_what_is_held_out_and_what_is_left_are_the_whole_set(seed: int, examples: int, count: int) -> None:
    left, held = sampler.held_out(seed, examples, min(count, examples))
    assert len(held) == min(count, examples) and sorted([*left, *held]) == list(range(examples))
    assert list(held) == sorted(held) and list(left) == sorted(left)


def test_a_few_of_many_examples_are_evenly_spaced() -> None:
    assert [list(sampler.spread(count, 10)) for count in (4, 10, 99)] == [
        [0, 2, 5, 7],
        list(range(10)),
        list(range(10)),
    ]


def _of_one_batch(length: int, size: int, *parts: Any) -> list[sampler.Sampler]:
    """Of each rank, where a global batch is the whole set, in the order of seed 0."""
    return [sampler.Sampler(length, length, 0, rank, size, *parts) for rank in range(size)]


@given(seeds, st.integers(0, 50), counts, batches, sizes, st.integers(1, 5))
def test_micro_batches_are_the_epoch_without_overlap(
    seed: int, epoch: int, examples: int, batch: int, size: int, accumulation: int
) -> None:
    whole = sampler.epoch_order(seed, epoch, examples)
    steps = sampler.steps_per_epoch(examples, batch)
    samplers = [sampler.Sampler(examples, batch, seed, rank, size, accumulation) for rank in range(size)]
    used: list[int] = []
    for step in range(steps):
        part = whole[step * batch : (step + 1) * batch]
        assert len(part) == sampler.examples_in_step(examples, batch, epoch * steps + step)
        for j in range(accumulation):
            number = (epoch * steps + step) * accumulation + j
            of_ranks = [of_rank.micro_batch(number) for of_rank in samplers]
            assert {at for at, _ in of_ranks} == {epoch}
            lengths = [len(micro_batch) for _, micro_batch in of_ranks]
            assert all(lengths)  # a rank without a micro-batch would make fewer steps than the others
            assert max(lengths) - min(lengths) <= 1
            used += [int(i) for _, micro_batch in of_ranks for i in micro_batch if i != sampler.PADDING]
        assert sorted(used[step * batch :]) == sorted(part)
    assert sorted(used) == list(range(examples))


@given(counts, st.integers(1, 6), sizes)
def test_accumulated_parts_are_the_same_for_any_number_of_ranks(length: int, parts: int, size: int) -> None:
    batch = sampler.epoch_order(0, 0, length)
    for j in range(parts):
        of_ranks = [rank.micro_batch(j)[1] for rank in _of_one_batch(length, size, parts)]
        present = sorted(int(i) for micro_batch in of_ranks for i in micro_batch if i != sampler.PADDING)
        assert present == sorted(batch[j * length // parts : (j + 1) * length // parts])


@given(counts, st.integers(0, 4), st.integers(0, 4))
def test_virtual_shards_are_the_same_for_any_number_of_ranks(length: int, of: int, ranks: int) -> None:
    shards, size = 2 ** max(of, ranks), 2 ** min(of, ranks)
    (alone,) = _of_one_batch(length, 1, 1, shards)
    found = [
        r.micro_batch(j)[1].tolist() for r in _of_one_batch(length, size, 1, shards) for j in range(r.micro_batches)
    ]
    assert found == [alone.micro_batch(j)[1].tolist() for j in range(shards)]  # in this order: neighbours on a rank
    assert sorted(i for shard in found for i in shard if i != sampler.PADDING) == list(range(length))


def test_order_depends_on_seed_and_epoch_and_is_fixed_for_ever() -> None:
    # Written down once: a run that is resumed under another NumPy or a later version of this program goes on.
    assert sampler.epoch_order(0, 0, 10).tolist() == [0, 1, 9, 4, 2, 3, 6, 8, 7, 5]
    orders = [sampler.epoch_order(seed, epoch, 10).tolist() for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    assert len(set(map(tuple, orders))) == 3
    held_out = [sampler.held_out(seed, 1000, 5)[1].tolist() for seed in (0, 2**40)]
    assert held_out == [[123, 426, 566, 703, 780], [37, 119, 410, 907, 933]]
    assert sampler.mix(np.uint64(7)) == 7191089600892374487
    assert sampler.mix(np.array([5], np.uint64), 7, 2).tolist() == [8699863324141622855]


def test_no_caller_can_change_the_order_of_another() -> None:
    with pytest.raises(ValueError, match="read-only"):
        sampler.epoch_order(0, 0, 10)[0] = 5
