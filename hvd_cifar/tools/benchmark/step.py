"""`benchmark step`: the training step, and the parts of its time.

Each repeat takes all ways in turn, so that a drift of the machine's speed favours none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.data.pipeline import PREFETCH_BATCHES, MicroBatch, training_batches
from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.batch_norm import synchronised_layers
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.runtime.world import World, session
from hvd_cifar.tools.benchmark.results import Result, estimate, facts, shown, tell
from hvd_cifar.tools.settings import BenchmarkStepSettings
from hvd_cifar.training.step import Averaging, make_train_step
from hvd_cifar.training.work import bucket_bytes_of, make_averages, make_net, make_optimizer, prepare, step_spec

# Small, so that the weights stay finite in many steps on one batch. It does not change a step's time.
LEARNING_RATE = 1e-3
# Steps before the clock starts: caches fill, and batches that the pipeline has made ahead are used up.
LEAD_IN = PREFETCH_BATCHES + 1
ENDLESS = 2**31  # steps
WAYS = ("fed", "step", "compute")  # ways to be compared are neighbours, against drift
# A process set of this rank alone, which needs no communication.
ALONE: Any = SimpleNamespace(included=lambda: True, size=lambda: 1)


def benchmark_step(settings: BenchmarkStepSettings) -> None:
    """Measure the training step on all ranks of this job. TrainingError for an efficiency below --min-efficiency."""
    if settings.min_efficiency is not None and (launched_size() or 1) == 1:
        raise UserError("--min-efficiency: the efficiency of one rank is always 1; start more (-np 2)")
    with session(settings.threads_per_rank) as world:
        found = measure(world, settings)
        collectives.on_root(lambda: tell(table(found), found, settings.json_file))
        judge(found, settings.min_efficiency)


def measure(world: World, options: BenchmarkStepSettings) -> Result:
    """Measure the step of `options` (model, batch_size, precision, steps, repeats, data); a collective.

    The result has, beside settings: `images_per_second`, and `_alone` of as many processes that do not communicate;
    `efficiency`, the ratio of both; `step_seconds`, computation and all-reduce; `compute_seconds`, without
    communication, and `compute_by_rank`; `fed_seconds`, the step fed by the pipeline, and `input_cost`, that over
    step_seconds, minus 1.
    """
    given = {name: getattr(options, name) for name in type(options).model_fields if name in TrainSettings.model_fields}
    bench = Bench(world, TrainSettings(**given))
    taken: dict[str, list[list[float]]] = {way: [] for way in WAYS}  # for each repeat, seconds of a step by rank
    for repeat in range(options.repeats + 1):
        for way in WAYS if repeat % 2 else WAYS[::-1]:
            by_rank = collectives.all_gather_object(bench.time(way, options.steps))
            if repeat:  # the first one traces and warms up
                taken[way].append(by_rank)
        if world.is_root and not repeat:
            terminal.say("warmed up")

    settings, batch = bench.work.settings, options.batch_size
    # A step takes as long as the slowest rank's.
    step, fed = ([max(by_rank) for by_rank in taken[way]] for way in ("step", "fed"))
    together = [world.size * batch / seconds for seconds in step]
    alone = [sum(batch / seconds for seconds in by_rank) for by_rank in taken["compute"]]
    return {
        "facts": facts(world),
        "model": settings.model,
        "precision": settings.precision,
        "dataset": bench.work.dataset.name,
        "per_rank_batch_size": batch,
        "compression": settings.compression,
        "bucket_bytes": bucket_bytes_of(bench.work, bench.net.model),  # None: sent after the backward pass
        "steps": options.steps,
        "images_per_second": estimate(together),
        "images_per_second_alone": estimate(alone),
        "efficiency": estimate([a / b for a, b in zip(together, alone, strict=True)]),
        "step_seconds": estimate(step),
        "compute_seconds": estimate([world.size * batch / rate for rate in alone]),
        "fed_seconds": estimate(fed),
        "input_cost": estimate([a / b - 1 for a, b in zip(fed, step, strict=True)]),
        "compute_by_rank": np.mean(taken["compute"], axis=0).tolist(),
    }


def table(found: Result) -> str:
    """Speed and efficiency, and the parts of a step's time."""
    by_rank, step = found["compute_by_rank"], found["step_seconds"]
    rows = {
        "images/s": shown(found["images_per_second"], 0),
        "images/s without communication": shown(found["images_per_second_alone"], 0),
        "efficiency": shown(found["efficiency"], 3),
    }
    if len(by_rank) > 1:
        rank = by_rank.index(max(by_rank))
        behind = f"{max(by_rank) / statistics.median_low(by_rank) - 1:.1%} behind the median"
        rows["slowest rank"] = f"{rank} on {found['facts']['hosts'][rank]}, {behind}"
        rows["exposed all-reduce, ms"] = f"{(step['mean'] - max(by_rank)) * 1e3:.2f}"
    rows |= {"step, ms": shown(step, 2, 1e3), "computation alone, ms": shown(found["compute_seconds"], 2, 1e3)}
    rows |= {"fed, ms": shown(found["fed_seconds"], 2, 1e3), "input costs": f"{shown(found['input_cost'], 1, 100)}%"}
    buckets = found["bucket_bytes"]
    sent = "in one message" if buckets is None else f"in buckets of {buckets / 2**10:,.0f} KiB"
    return "\n".join(
        [
            f"{found['model']}, {found['precision']}, {found['per_rank_batch_size']} images a rank and step; "
            f"{found['dataset']}; mean ± standard error of {step['n']} x {found['steps']} steps",
            *(f"  {name:<{max(map(len, rows))}}  {value}" for name, value in rows.items()),
            f"gradients leave {sent}; compression: {found['compression']}",
        ]
    )


def judge(found: Result, wanted: float | None) -> None:
    """TrainingError where the efficiency is below `wanted`."""
    if wanted is not None and found["efficiency"]["mean"] < wanted:
        raise TrainingError(
            f"scaling efficiency on {len(found['compute_by_rank'])} ranks is {shown(found['efficiency'], 4)}, below "
            f"--min-efficiency {wanted:g}: {found['images_per_second']['mean']:,.0f} images/s, of "
            f"{found['images_per_second_alone']['mean']:,.0f} without communication"
        )


class Bench:
    """This rank's part in each of `WAYS`."""

    def __init__(self, world: World, settings: TrainSettings) -> None:
        """Of settings with a batch size; a collective."""
        self.world = world
        self.work = work = prepare(settings, world)
        batch = work.plan.global_batch_size
        whole = work.plan.examples // batch * batch  # no ragged batch: all take the same time
        sampler = replace(work.sampler, examples=whole, global_batch_size=batch)
        device = world.device if "GPU" in world.device else ""
        batches = training_batches(
            work.dataset.train, work.transforms, sampler, first_step=0, last_step=ENDLESS, device=device
        )
        self.net = collectives.on_every_rank(lambda: make_net(work))
        layers = synchronised_layers(self.net.model)
        if layers and world.size > 1:
            raise UserError(
                f"the layer {layers[0].name} ({type(layers[0]).__name__}) has statistics over all ranks, and a part of "
                "benchmark computes without the others; take keras.layers.BatchNormalization"
            )
        with tf.device(world.device):
            in_memory = MicroBatch(*map(tf.identity, next(batches)))
        self.averages = list(make_averages(work.recipe, self.net, ENDLESS).values())
        together = self._step(make_optimizer(work, self.net, LEARNING_RATE), world.size)
        alone = self._step(make_optimizer(work, self.net, LEARNING_RATE, ALONE), 1)
        self.once: dict[str, Callable[[], Any]] = {
            "fed": lambda: together(next(batches)),
            "step": lambda: together(in_memory),
            "compute": lambda: alone(in_memory),
        }

    def time(self, way: str, steps: int) -> float:
        """This rank's mean seconds of a step in a way, all ranks at once; a collective."""
        self.repeat(way, LEAD_IN)
        collectives.barrier()
        began = time.perf_counter()
        self.repeat(way, steps)
        return (time.perf_counter() - began) / steps

    def repeat(self, way: str, times: int) -> None:
        """Make steps in a way; it returns when the device has finished."""
        for _ in range(times):
            result = self.once[way]()
        np.asarray(result)  # waits for the device

    def _step(self, optimizer: Any, ranks: int) -> Callable[[MicroBatch], Any]:
        """The step of training: on a rank's batch of `ranks` of them."""
        observers = [Averaging(average) for average in self.averages]
        step, flags = make_train_step(self.net, optimizer, step_spec(self.work), observers), tf.zeros([0])
        count = tf.constant(self.work.plan.global_batch_size // self.world.size * ranks)
        return lambda batch: step([batch], count, LEARNING_RATE, flags)
