"""A rank's batches: the order's own, sharded, augmented by example, also from the middle on."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from hvd_cifar.data import sampler
from hvd_cifar.data.augment import draws, transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import PREFETCH_BATCHES, MicroBatch, evaluation_batches, training_batches
from hvd_cifar.errors import UserError
from tests.ranks import CHECKOUT

COUNT = 23


def _dataset(height: int, width: int, channels: int) -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (COUNT, height, width, channels)).astype(np.uint8)
    labels = np.arange(COUNT) % 10
    return Dataset.from_arrays(images, labels, images, labels)


DATASET = _dataset(32, 32, 3)
STANDARD_TRANSFORMS = transforms("standard", DATASET)


def _batches(
    size: int,
    batch: int,
    first: int,
    last: int,
    accumulation: int = 1,
    virtual_shards: int | None = None,
) -> list[list[Any]]:
    """For each rank its micro-batches of the steps first .. last - 1."""
    return [
        [
            MicroBatch(*map(np.asarray, batch))
            for batch in training_batches(
                DATASET.train,
                STANDARD_TRANSFORMS,
                sampler.Sampler(COUNT, batch, 5, rank, size, accumulation, virtual_shards),
                first_step=first,
                last_step=last,
            )
        ]
        for rank in range(size)
    ]


@pytest.mark.parametrize(
    ("size", "batch", "accumulation", "virtual_shards"),
    [
        (1, 8, 1, None),
        (3, 7, 1, None),
        (5, 4, 1, None),
        (4, 23, 1, None),
        (3, 10, 3, None),  # 23 = 10 + 10 + 3: micro-batches without an example in the last batch
        (2, 10, 1, 4),
    ],
)
def test_every_rank_makes_every_step_on_its_shard_of_the_order(
    size: int, batch: int, accumulation: int, virtual_shards: int | None
) -> None:
    steps = sampler.steps_per_epoch(COUNT, batch)
    ranks = _batches(size, batch, 0, 2 * steps, accumulation=accumulation, virtual_shards=virtual_shards)
    for rank, elements in enumerate(ranks):
        whole = sampler.Sampler(COUNT, batch, 5, rank, size, accumulation, virtual_shards)
        assert len(elements) == 2 * steps * whole.micro_batches
        for number, found in enumerate(elements):
            epoch, example = whole.micro_batch(number)
            present = np.maximum(found.example, 0)
            seen = STANDARD_TRANSFORMS.train(DATASET.train.images[present], draws(5, epoch, present))
            assert (found.image == seen).all()  # distorted as in this epoch
            assert found.example.tolist() == example.tolist()
            assert found.weight.tolist() == [float(e >= 0) for e in found.example]
            assert (found.label[found.example >= 0] == found.example[found.example >= 0] % 10).all()


@pytest.mark.parametrize("name", ["standard", "fast", "tutorial", "none"])
@pytest.mark.parametrize("shape", [(28, 28, 1), (9, 20, 4)])
def test_images_of_any_shape_go_through(name: str, shape: tuple[int, int, int]) -> None:
    dataset = _dataset(*shape)
    seen = transforms(name, dataset)
    alone = sampler.Sampler(COUNT, 8, 5, 0, 1)
    for image, *_ in training_batches(dataset.train, seen, alone, first_step=0, last_step=3):
        assert image.shape[1:] == seen.shape and np.isfinite(image.numpy()).all()
    tests = evaluation_batches(dataset.test, seen, batch_size=COUNT, rank=0, size=1)
    ((image, _),) = tests
    assert image.shape == (COUNT, *seen.shape)
    assert abs(np.mean(image)) < 0.01 and abs(np.std(image) - 1) < 0.01  # by the set's own mean and deviation


@pytest.mark.parametrize("size", [1, 3, 30])
def test_evaluation_sees_every_example_once(size: int) -> None:
    labels: list[int] = []
    for rank in range(size):
        batches = evaluation_batches(DATASET.train, STANDARD_TRANSFORMS, batch_size=4, rank=rank, size=size)
        labels += [int(v) for _, label in batches for v in label]
    assert sorted(labels) == sorted(DATASET.train.labels.tolist())


def test_batches_are_made_a_few_ahead() -> None:
    made: list[int] = []

    def noted(images: Any, draw: Any) -> Any:
        made.append(len(images))
        return STANDARD_TRANSFORMS.train(images, draw)

    seen = STANDARD_TRANSFORMS._replace(train=noted)
    alone = sampler.Sampler(COUNT, 4, 0, 0, 1)
    batches = iter(training_batches(DATASET.train, seen, alone, first_step=0, last_step=100))
    next(batches)
    deadline = time.monotonic() + 60
    while len(made) < 1 + PREFETCH_BATCHES and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(made) == 1 + PREFETCH_BATCHES  # and nothing more is made until one is taken
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(made) == 2 + PREFETCH_BATCHES


def test_an_unreadable_file_is_the_error_of_this_rank() -> None:
    def fail(images: Any, draw: Any) -> Any:
        raise UserError("x has become shorter: restore it")

    seen = STANDARD_TRANSFORMS._replace(train=fail)
    alone = sampler.Sampler(COUNT, 4, 0, 0, 1)
    with pytest.raises(UserError, match="x has become shorter") as caught:
        next(iter(training_batches(DATASET.train, seen, alone, first_step=0, last_step=100)))
    assert caught.value.of_one_rank


def test_a_program_ends_while_batches_are_made() -> None:
    """A thread of TensorFlow's that waits for Python's lock at the end of the program would hold it for ever."""
    program = (
        "import numpy as np; from hvd_cifar.data import pipeline\n"
        "batches = iter(pipeline.ahead(lambda n: np.sort(np.random.rand(200_000)), range(10**9)))\n"
        "next(batches); print('ends')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=CHECKOUT)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
