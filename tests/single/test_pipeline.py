"""A rank's batches: the order's own, sharded, augmented by example, also from the middle on."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from hvd_cifar.data import sampler
from hvd_cifar.data.augment import STANDARD_VIEWS, TUTORIAL_VIEWS, Views
from hvd_cifar.data.cifar import Examples
from hvd_cifar.data.pipeline import PREFETCH_BATCHES, evaluation_batches, in_steps, settle, training_batches

COUNT = 23


def _examples() -> Examples:
    draw = np.random.default_rng(0)
    return Examples(draw.integers(0, 256, (COUNT, 32, 32, 3)).astype(np.uint8), np.arange(COUNT, dtype=np.int32) % 10)


def _batches(
    size: int,
    batch: int,
    first: int,
    last: int,
    views: Views = STANDARD_VIEWS,
    micro_batches: int = 1,
    virtual_shards: int | None = None,
) -> list[list[Any]]:
    """For each rank its slices of the steps first .. last - 1."""
    return [
        list(
            training_batches(
                _examples(),
                views,
                seed=5,
                global_batch_size=batch,
                deal=sampler.Deal(rank, size, micro_batches, virtual_shards),
                first_step=first,
                last_step=last,
            ).as_numpy_iterator()
        )
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("size", "batch", "micro_batches", "virtual_shards"),
    [
        (1, 8, 1, None),
        (2, 8, 1, None),
        (3, 8, 1, None),
        (3, 7, 1, None),
        (5, 4, 1, None),
        (4, 23, 1, None),
        (2, 22, 1, None),
        (1, 10, 3, None),
        (3, 10, 3, None),  # 23 = 10 + 10 + 3: slices without an example in the last batch
        (1, 10, 1, 4),
        (2, 10, 1, 4),
        (4, 10, 1, 4),
    ],
)
def test_every_rank_makes_every_step_on_its_slices_of_the_order(
    size: int, batch: int, micro_batches: int, virtual_shards: int | None
) -> None:
    steps = sampler.steps_per_epoch(COUNT, batch)
    ranks = _batches(size, batch, 0, 2 * steps, micro_batches=micro_batches, virtual_shards=virtual_shards)
    for rank, elements in enumerate(ranks):
        deal = sampler.Deal(rank, size, micro_batches, virtual_shards)
        by_step = list(in_steps(elements, deal.slices))
        assert len(by_step) == 2 * steps
        for at, slices in enumerate(by_step):
            epoch, step = divmod(at, steps)
            part = sampler.epoch_order(5, epoch, COUNT)[step * batch : (step + 1) * batch]
            assert len(slices) == deal.slices
            for j, (_, label, weight, example) in enumerate(slices):
                assert example.tolist() == deal.slice_of(part, j).tolist()
                assert weight.tolist() == [float(e >= 0) for e in example]
                assert (label[example >= 0] == example[example >= 0] % 10).all()


@pytest.mark.parametrize("views", [STANDARD_VIEWS, TUTORIAL_VIEWS])
def test_an_image_does_not_depend_on_the_number_of_ranks(views: Views) -> None:
    def by_example(size: int) -> dict[tuple[int, int], Any]:
        found = {}
        for batches in _batches(size, 8, 0, 6, views):
            for step, (image, _, _, example) in enumerate(batches):
                found.update({(step, int(e)): i for e, i in zip(example, image, strict=True) if e >= 0})
        return found

    alone, three = by_example(1), by_example(3)
    assert alone.keys() == three.keys() and len(alone) == 2 * COUNT
    assert all((alone[k] == three[k]).all() for k in alone)


@pytest.mark.parametrize("first", [1, 3, 4, 7])
def test_going_on_in_the_middle_gives_the_same_batches(first: int) -> None:
    whole, rest = _batches(2, 8, 0, 9), _batches(2, 8, first, 9)
    for rank in range(2):
        assert len(rest[rank]) == 9 - first
        for then, now in zip(whole[rank][first:], rest[rank], strict=True):
            assert all((a == b).all() for a, b in zip(then, now, strict=True))


def test_nothing_is_left_when_all_steps_are_done() -> None:
    assert _batches(2, 8, 6, 6) == [[], []]
    assert _batches(2, 8, 9, 6) == [[], []]
    assert _batches(2, 8, 8, 7) == [[], []]


@pytest.mark.parametrize("size", [1, 2, 3, 30])
def test_evaluation_sees_every_example_once(size: int) -> None:
    labels: list[int] = []
    for rank in range(size):
        batches = evaluation_batches(_examples(), STANDARD_VIEWS, batch_size=4, rank=rank, size=size)
        labels += [int(v) for _, label in batches.as_numpy_iterator() for v in label]
    assert sorted(labels) == sorted(_examples().labels.tolist())
    few: list[int] = []
    for rank in range(size):
        batches = evaluation_batches(_examples(), STANDARD_VIEWS, batch_size=4, rank=rank, size=size, count=7)
        few += [int(v) for _, label in batches.as_numpy_iterator() for v in label]
    assert sorted(few) == sorted(_examples().labels[:7].tolist())


def test_settling_waits_until_the_buffer_is_full() -> None:
    made: list[int] = []

    def slow(images: Any, draw: Any) -> Any:
        time.sleep(0.02)
        made.append(len(images))
        return STANDARD_VIEWS.train(images, draw)

    views = STANDARD_VIEWS._replace(train=slow)
    batches = training_batches(
        _examples(), views, seed=0, global_batch_size=4, deal=sampler.Deal(0, 1), first_step=0, last_step=100
    )
    elements = iter(batches)
    next(elements)
    settle()
    assert len(made) == 1 + PREFETCH_BATCHES
    time.sleep(0.2)
    assert len(made) == 1 + PREFETCH_BATCHES  # and nothing more is made until one is taken
