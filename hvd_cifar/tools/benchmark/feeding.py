"""`benchmark input`: feed all ranks epochs of the training set in three ways, without training.

All ways use the pipeline of training with the same batch and transforms. "split": rank 0 makes each global batch and
sends every rank its part. "drawn": every rank shuffles the whole set by a seed of its own. "sharded": every rank makes
its shard of one common order, as in `train`. The ways take turns, an epoch each.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.config import BenchmarkInputSettings
from hvd_cifar.data.augment import TrainTransform
from hvd_cifar.data.pipeline import Batches, MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler, Sharding
from hvd_cifar.distributed import collectives
from hvd_cifar.tools.benchmark.job import Job, facts_of, memory_of_this_process
from hvd_cifar.tools.benchmark.results import Estimate, FeedResult, FeedWay, InputResult, Seen
from hvd_cifar.tools.benchmark.step import train_settings
from hvd_cifar.training.assemble import Work, prepare

WAYS: tuple[FeedWay, ...] = get_args(FeedWay)
SHOWN = 200  # examples whose ranks the result names one by one


@dataclass(frozen=True)
class Turn:
    """One rank's epoch in one way.

    Attributes:
        seconds: from the barrier before the first batch to the last batch.
        processor: seconds of all threads in that time, which include polling.
        held: bytes of images in memory while one batch is in use and the pipeline's buffer is full, which it is where
            training is slower than the input.
        examples: the indices that this rank got, in order.
    """

    seconds: float
    processor: float
    held: int
    examples: NDArray[np.int64]


def measure(job: Job, options: BenchmarkInputSettings) -> InputResult:
    """Give the ranks `options.repeats` epochs in each way; a collective, and every rank returns the same.

    Raises:
        UserError: where a setting does not fit the data or the job, or a file of the data cannot be read.
    """
    work = prepare(train_settings(options), job.world)
    ways = Feeds(job, work)
    turns: dict[FeedWay, list[list[Turn]]] = {way: [] for way in WAYS}  # by way, epoch and rank
    for epoch in range(options.repeats + 1):
        for way in WAYS if epoch % 2 else WAYS[::-1]:
            by_rank = collectives.all_gather_object(ways.turn(way, epoch))
            if epoch:  # the first one warms up: files come into memory, functions are traced
                turns[way].append(by_rank)
    examples = work.plan.examples
    return InputResult(
        facts=facts_of(job.world),
        model=work.settings.model,
        dataset=work.dataset.name,
        examples=examples,
        per_rank_batch_size=options.batch_size,
        image_shape=list(work.transforms.shape),
        memory_by_rank=collectives.all_gather_object(memory_of_this_process()),
        ways=[result_of(way, turns[way], examples) for way in WAYS],
    )


class Feeds:
    """This rank's batches in each way. Every method is a collective."""

    def __init__(self, job: Job, work: Work) -> None:
        self.world, self.plan = job.world, work.plan
        self.examples, seed = work.dataset.train, work.settings.seed
        shard = Sampler(self.plan.examples, self.plan.global_batch_size, seed, work.sharding)
        self.samplers: dict[FeedWay, Sampler] = {
            "split": replace(shard, sharding=Sharding(rank=0, size=1)),
            "drawn": replace(shard, seed=seed + self.world.rank),
            "sharded": shard,
        }
        # Counted by batch: resident memory cannot tell the ways apart, since TensorFlow keeps what one way frees.
        self.made: list[int] = []  # bytes of images; a list, since several threads can append safely
        self.transforms = work.transforms._replace(train=self._counted(work.transforms.train))
        kinds = {"image": tf.float32, "label": tf.int32, "weight": tf.float32, "example": tf.int64}
        spec = [
            tf.TensorSpec([None, *(work.transforms.shape if name == "image" else ())], kind)
            for name, kind in kinds.items()
        ]
        self.scatter = collectives.make_scatter(spec)
        self.nothing = MicroBatch(*(tf.zeros([0, *one.shape[1:]], one.dtype) for one in spec))

    def _counted(self, train: TrainTransform) -> TrainTransform:
        def counted(images: NDArray[np.uint8], draws: NDArray[np.float32]) -> NDArray[np.float32]:
            made = train(images, draws)
            self.made.append(made.nbytes)
            return made

        return counted

    def batches(self, way: FeedWay, epoch: int) -> Iterator[MicroBatch]:
        """This rank's batches of an epoch; those of "split" are received through collectives."""
        if way != "split":
            yield from self._pipeline(way, epoch)
            return
        steps, is_root = self.plan.steps_per_epoch, self.world.is_root
        whole = self._pipeline(way, epoch) if is_root else itertools.repeat(self.nothing, steps)
        for batch in whole:  # rank 0 has as many as the others have of `nothing`
            parts = np.array_split(np.arange(len(batch.label)), self.world.size)
            received = MicroBatch(*self.scatter(batch, [len(part) for part in parts]))
            self.made.append(received.image.numpy().nbytes)
            yield received

    def _pipeline(self, way: FeedWay, epoch: int) -> Batches[MicroBatch]:
        first, last = (self.plan.steps_per_epoch * e for e in (epoch, epoch + 1))
        sampler = self.samplers[way]
        return training_batches(self.examples, self.transforms, sampler, first_step=first, last_step=last)

    def turn(self, way: FeedWay, epoch: int) -> Turn:
        """Fill the buffer, then take a whole epoch from its beginning."""
        held, used = self._held(way, epoch), []
        collectives.barrier()
        processor, began = time.process_time(), time.perf_counter()
        for batch in self.batches(way, epoch):
            used.append(batch.example.numpy()[batch.weight.numpy() > 0])
        seconds, processor = time.perf_counter() - began, time.process_time() - processor
        collectives.barrier()
        return Turn(seconds, processor, held, np.concatenate(used))

    def _held(self, way: FeedWay, epoch: int) -> int:
        self.made.clear()
        batches = self.batches(way, epoch)
        next(batches)
        time.sleep(0.5)  # until the buffer is full
        return sum(self.made)


def result_of(way: FeedWay, turns: Sequence[Sequence[Turn]], examples: int) -> FeedResult:
    """From the turns by epoch and rank, on a training set of `examples`. An epoch takes as long as its slowest rank."""
    images = [sum(len(turn.examples) for turn in by_rank) for by_rank in turns]
    processor = [[turn.processor for turn in by_rank] for by_rank in turns]
    per_thousand = [[1000 * s / n for s in of_ranks] for of_ranks, n in zip(processor, images, strict=True)]
    first: list[list[int]] = [[] for _ in range(min(SHOWN, examples))]
    for rank, turn in enumerate(turns[-1]):
        for example in turn.examples[turn.examples < len(first)]:
            first[example].append(rank)
    return FeedResult(
        way=way,
        images_per_second=Estimate.of(
            [n / max(turn.seconds for turn in by_rank) for n, by_rank in zip(images, turns, strict=True)]
        ),
        processor_seconds=Estimate.of([sum(of_ranks) for of_ranks in per_thousand]),
        processor_seconds_by_rank=[Estimate.of(of_rank) for of_rank in zip(*per_thousand, strict=True)],
        # The largest of all epochs: a suspended thread may leave the buffer partly empty.
        held_by_rank=[max(turn.held for turn in of_rank) for of_rank in zip(*turns, strict=True)],
        epochs=[seen([turn.examples for turn in by_rank], examples) for by_rank in turns],
        ranks_of_first=first,
    )


def seen(by_rank: Sequence[NDArray[np.int64]], examples: int) -> Seen:
    """How often an epoch used each of the `examples`; `by_rank` has the indices that each rank used."""
    total, ranks = np.zeros(examples, np.int64), np.zeros(examples, np.int64)
    different = []
    for used in by_rank:
        uses = np.bincount(used, minlength=examples)
        total += uses
        ranks += uses > 0
        different.append(int((uses > 0).sum()))
    return Seen(
        never=int((total == 0).sum()),
        once=int((total == 1).sum()),
        more=int((total > 1).sum()),
        by_ranks=np.bincount(ranks, minlength=len(by_rank) + 1).tolist(),
        uses_by_rank=[len(used) for used in by_rank],
        different_by_rank=different,
    )
