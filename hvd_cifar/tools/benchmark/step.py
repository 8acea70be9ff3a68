"""`benchmark step`: the training step on 1 to N ranks, and the parts of its time.

All measurements run in one job. Each repeat takes all numbers of ranks and all ways in turn, so that a drift of the
machine's speed favours none. While the first k ranks are measured, the others wait in a collective.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.data.pipeline import PREFETCH_BATCHES, MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler
from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.distributed.batch_norm import synchronised_layers
from hvd_cifar.distributed.optimizer import reduction_of, set_bucket_bytes
from hvd_cifar.distributed.overlap import Backward
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.tools.benchmark.job import Job, facts_of
from hvd_cifar.tools.benchmark.results import Estimate, Gradient, Phases, StepResult, WorldResult
from hvd_cifar.tools.settings import BenchmarkStepSettings
from hvd_cifar.training.overlap import measure_backward, set_buckets
from hvd_cifar.training.plan import precision_of
from hvd_cifar.training.step import Averaging, make_train_step
from hvd_cifar.training.work import (
    Work,
    make_averages,
    make_net,
    make_optimizer,
    prepare,
    step_spec,
)

# Small, so that the weights stay finite in many steps on one batch. It does not change a step's time.
LEARNING_RATE = 1e-3
# Steps before the clock starts: caches fill, and batches that the pipeline has made ahead are used up.
LEAD_IN = 2
LEAD_IN_OF_FED = PREFETCH_BATCHES + 1
ENDLESS = 2**31  # steps
WAYS = ("communication", "fed", "step", "compute")  # ways to be compared are neighbours, against drift

Repeat = Callable[[int], None]  # repeats something n times, and returns when the device has finished


def measure(job: Job, options: BenchmarkStepSettings) -> StepResult:
    """Measure the step of `options` (model, batch_size, precision, steps, repeats, data) on all groups of the job.

    A collective; every rank returns the same.
    """
    bench = make_bench(job, train_settings(options))
    turns = [(k, way) for k in job.sets for way in WAYS if not (way == "communication" and k == 1)]
    # By ranks and way: for each repeat, mean seconds of a step by rank.
    taken: dict[int, dict[str, list[list[float]]]] = {k: defaultdict(list) for k in job.sets}
    for repeat in range(options.repeats + 1):
        for k, way in turns if repeat % 2 else turns[::-1]:
            by_rank: list[list[float]] = collectives.all_gather_object(bench.time(k, way, options.steps))[:k]
            if repeat == 0:  # traces and warms up
                continue
            taken[k][way].append([statistics.fmean(seconds) for seconds in by_rank])
            if way == "compute":  # "lockstep" is the same, if each step waited for its slowest rank
                taken[k]["lockstep"].append([statistics.fmean(max(step) for step in zip(*by_rank, strict=True))])
        if job.world.is_root and repeat == 0:
            terminal.say("\n".join([*bench.overlap, "warmed up"]))

    facts, settings = facts_of(job.world), bench.work.settings
    return StepResult(
        facts=facts,
        model=settings.model,
        precision=precision_of(settings),
        dataset=bench.work.dataset.name,
        per_rank_batch_size=options.batch_size,
        compression=settings.compression,
        bucket_bytes=bench.bucket_bytes,
        steps=options.steps,
        worlds=[_world_result(k, taken[k], options.batch_size) for k in job.sets],
        phases=_phases(bench, options.repeats, statistics.median(map(max, taken[max(job.sets)]["compute"]))),
    )


def train_settings(options: BenchmarkStepSettings) -> TrainSettings:
    """The settings of the training whose step `options` describe."""
    given = {name: getattr(options, name) for name in type(options).model_fields if name in TrainSettings.model_fields}
    return TrainSettings(**given)


def make_bench(job: Job, settings: TrainSettings) -> Bench:
    """A bench for settings with a batch size; a collective."""
    work = prepare(settings, job.world)
    return Bench(job, work, _endless_batches(job, work))


def _endless_batches(job: Job, work: Work) -> Iterator[MicroBatch]:
    """This rank's micro-batches as `train` makes them, but without ragged batches: all take the same time."""
    batch = work.plan.global_batch_size
    whole = work.plan.examples // batch * batch
    batches = training_batches(
        work.dataset.train,
        work.transforms,
        Sampler(whole, batch, work.settings.seed, work.sharding),
        first_step=0,
        last_step=ENDLESS,
        device=job.world.device if "GPU" in job.world.device else "",
    )
    return iter(batches)


class Bench:
    """This rank's part in each way. A way is traced at its first use, since a trace takes seconds."""

    def __init__(self, job: Job, work: Work, batches: Iterator[MicroBatch]) -> None:
        self.job = job
        self.work = work
        self.net = collectives.on_every_rank(lambda: make_net(work))
        layers = synchronised_layers(self.net.model)
        if layers and job.world.size > 1:
            raise UserError(
                f"benchmark measures groups of ranks, and the layer {layers[0].name} ({type(layers[0]).__name__}) has "
                "statistics over all ranks; take keras.layers.BatchNormalization"
            )
        self.batches = batches
        with tf.device(job.world.device):
            self.in_memory = MicroBatch(*map(tf.identity, next(batches)))
        self.averages = list(make_averages(work.recipe, self.net, ENDLESS).values())
        # The buckets are chosen for all ranks, and smaller groups use the same ones.
        self._model_optimizer = make_optimizer(work, self.net, LEARNING_RATE)
        examples = len(self.in_memory.label)
        self.overlap = set_buckets(work.settings, job.world, self.net, self._model_optimizer, step_spec(work), examples)
        reduction = reduction_of(self._model_optimizer)
        self.bucket_bytes = reduction.bucket_bytes if reduction else None
        self._repeats: dict[tuple[int, str], Repeat] = {}
        self._steps: dict[int, Callable[..., Any]] = {}

    def time(self, k: int, way: str, steps: int) -> list[float]:
        """Seconds of each step on the first k ranks, while the others wait; a collective.

        Empty on a rank that waits. On a GPU, which works asynchronously, one mean.
        """
        collectives.barrier()
        seconds: list[float] = []
        if self.job.includes_me(k):
            repeat = self.repeat(k, way)
            collectives.barrier(self.job.sets[k])
            repeat(LEAD_IN_OF_FED if way == "fed" else LEAD_IN)
            at_once = steps if "GPU" in self.job.world.device else 1
            for _ in range(steps // at_once):
                began = time.perf_counter()
                repeat(at_once)
                seconds.append((time.perf_counter() - began) / at_once)
        collectives.barrier()
        return seconds

    def repeat(self, k: int, way: str) -> Repeat:
        """The function of a way on the first k ranks."""
        if (k, way) not in self._repeats:
            self._repeats[k, way] = _repeated(self._once(k, way))
        return self._repeats[k, way]

    def _once(self, k: int, way: str) -> Callable[[], Any]:
        ranks = self.job.sets[k]
        if way == "step":
            return self._step(ranks, k, lambda: self.in_memory)
        if way == "fed":
            return self._step(ranks, k, lambda: next(self.batches))
        if way == "compute":
            return self._step(process_sets.ALONE, 1, lambda: self.in_memory)
        assert way == "communication"
        return self._reduction(ranks)

    def _step(self, ranks: Any, k: int, batch: Callable[[], MicroBatch]) -> Callable[[], Any]:
        """The step of training on batches of k ranks, with gradients summed over a process set."""
        if k not in self._steps:  # one graph for each group, whether it is fed or not
            optimizer = make_optimizer(self.work, self.net, LEARNING_RATE, ranks)
            set_bucket_bytes(optimizer, self.bucket_bytes)
            observers = [Averaging(average) for average in self.averages]
            self._steps[k] = make_train_step(self.net, optimizer, step_spec(self.work), observers)
        step, flags = self._steps[k], tf.zeros([0])
        count = tf.constant(self.work.plan.global_batch_size // self.job.world.size * k)
        return lambda: step([batch()], count, LEARNING_RATE, flags)

    def _reduction(self, ranks: Any) -> Callable[[], Any]:
        """The all-reduce of the gradients alone, as the optimizer does it."""
        reduction = reduction_of(make_optimizer(self.work, self.net, LEARNING_RATE, ranks))
        assert reduction, "make_optimizer distributes it"
        with tf.device(self.job.world.device):
            gradients = [tf.zeros(v.shape, v.dtype) for v in self.net.model.trainable_variables]
        reduce = tf.function(lambda: reduction.reduce(gradients), autograph=False)
        return lambda: reduce()[-1]

    def backward(self, repeats: int) -> tuple[Backward, list[int]]:
        """The slowest rank's backward pass; see `measure_backward`. A collective."""
        spec, examples = step_spec(self.work), len(self.in_memory.label)
        return measure_backward(self.net, self._model_optimizer, spec, examples, repeats)


def _repeated(once: Callable[[], Any]) -> Repeat:
    def repeat(times: int) -> None:
        for _ in range(times):
            result = once()
        np.asarray(result)  # waits for the device

    return repeat


def _world_result(k: int, taken: dict[str, list[list[float]]], batch: int) -> WorldResult:
    """From seconds by way, repeat and rank. A group's step takes as long as its slowest rank's."""
    step = [max(by_rank) for by_rank in taken["step"]]
    fed = [max(by_rank) for by_rank in taken["fed"]]
    images = [k * batch / s for s in step]
    alone = [sum(batch / s for s in by_rank) for by_rank in taken["compute"]]
    return WorldResult(
        ranks=k,
        images_per_second=Estimate.of(images),
        images_per_second_alone=Estimate.of(alone),
        efficiency=Estimate.of([a / b for a, b in zip(images, alone, strict=True)]),
        step_seconds=Estimate.of(step),
        compute_seconds=Estimate.of([k * batch / rate for rate in alone]),
        lockstep_seconds=Estimate.of([of_slowest for (of_slowest,) in taken["lockstep"]]),
        communication_seconds=Estimate.of([max(s) for s in taken["communication"]]) if k > 1 else None,
        fed_seconds=Estimate.of(fed),
        input_cost=Estimate.of([a / b - 1 for a, b in zip(fed, step, strict=True)]),
        compute_by_rank=[statistics.fmean(seconds) for seconds in zip(*taken["compute"], strict=True)],
    )


def _phases(bench: Bench, repeats: int, compute: float) -> Phases:
    """`compute`: seconds of the whole step without communication. A collective."""
    backward, order = bench.backward(repeats)
    variables = bench.net.model.trainable_variables
    return Phases(
        forward_seconds=backward.before,
        backward_seconds=backward.ready[-1],
        update_seconds=max(0.0, compute - backward.seconds),
        gradients=[
            Gradient(name=variables[i].path, bytes=size, ready_seconds=at)
            for i, size, at in zip(order, backward.sizes, backward.ready, strict=True)
        ],
    )
