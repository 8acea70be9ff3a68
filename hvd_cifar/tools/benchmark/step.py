"""`benchmark step`: the training step on 1 to N ranks, and the parts of its time.

All of it runs in one job, in turns: each repeat goes through all numbers of ranks and all ways, so that a machine that
drifts favours none. Ranks that are not among the first k wait, in a collective, while these are measured.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvd_cifar.config import StepWork, TrainSettings
from hvd_cifar.data.augment import Views
from hvd_cifar.data.dataset import Examples
from hvd_cifar.data.pipeline import PREFETCH_BATCHES, training_batches
from hvd_cifar.data.sampler import Sampler, Sharding
from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.models import Net
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.reporting import terminal
from hvd_cifar.tools.benchmark.job import Job, facts_of, memory_of_this_process
from hvd_cifar.tools.benchmark.results import Estimate, Gradient, Phases, SlowestRank, StepResult, WorldResult
from hvd_cifar.training.assemble import for_machines, make_net, make_optimizer
from hvd_cifar.training.recipe import plan, precision_of, resolve, set_precision
from hvd_cifar.training.sources import prepare_data, views_of
from hvd_cifar.training.step import cross_entropy, make_train_step

# Small, so that a net that sees one batch again and again stays finite; a step takes as long at any rate.
LEARNING_RATE = 1e-3
# Before the clock starts: caches fill, and batches that the pipeline has made ahead are used up.
LEAD_IN = 2
LEAD_IN_OF_INPUT = PREFETCH_BATCHES + 1
WAYS = ("communication", "input", "fed", "step", "compute")  # what is compared, one right after the other
CUTS = 4  # of the backward pass, at which its time is taken
PHASES = ("forward", *(f"backward {i}" for i in range(1, CUTS + 1)))

Work = Callable[[int], None]  # do it so many times, and come back when all is done


def measure(job: Job, options: StepWork) -> StepResult:
    """Measure the step of `options` (model, batch_size, precision, steps, repeats, data) on all groups of the job.

    A collective; every rank returns the same.
    """
    world = job.world
    given = {name: getattr(options, name) for name in type(options).model_fields if name in TrainSettings.model_fields}
    settings = for_machines(resolve(TrainSettings(**given)), world)
    bench = make_bench(job, settings)

    most = max(job.sets)
    turns = [(k, way) for k in job.sets for way in WAYS if not (way == "communication" and k == 1)]
    turns += [(most, phase) for phase in PHASES]
    taken: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    waited: list[list[float]] = []
    for repeat in range(options.repeats + 1):
        for k, way in turns if repeat % 2 else turns[::-1]:
            by_rank = collectives.all_gather_object(bench.time(k, way, options.steps))
            if repeat:  # the first one traces and warms up
                taken[k, way].append([statistics.fmean(looks) for looks, _ in by_rank[:k]])
                waited.append([cpu for _, cpu in by_rank[k:]])
                if way == "compute":
                    # If each step waited for its slowest rank, and nothing else.
                    slowest = [max(look) for look in zip(*(looks for looks, _ in by_rank[:k]), strict=True)]
                    taken[k, "lockstep"].append([statistics.fmean(slowest)])
        if world.is_root and repeat == 0:
            terminal.say("warmed up")

    facts = facts_of(world)
    batch = settings.batch_size or 0
    return StepResult(
        facts=facts,
        model=settings.model,
        precision=precision_of(settings),
        dataset=bench.dataset,
        per_rank_batch_size=batch,
        steps=options.steps,
        worlds=[
            _world_result(k, {way: of_k for (n, way), of_k in taken.items() if n == k}, batch, facts.hosts)
            for k in job.sets
        ],
        phases=_phases(bench.net, {phase: taken[most, phase] for phase in ("compute", *PHASES)}),
        memory_by_rank=collectives.all_gather_object(memory_of_this_process()),
        waiting_cpu=statistics.fmean(c for cs in waited for c in cs) if any(waited) else None,
    )


def make_bench(job: Job, settings: TrainSettings) -> Bench:
    """A bench for resolved settings that have a precision and a batch; a collective."""
    dataset = prepare_data(settings, job.world)
    views = views_of(settings.model, dataset)
    batch_plan = plan(settings, len(dataset.train), job.world.size)
    set_precision(precision_of(settings), settings.seed)
    net = make_net(settings, views)
    batches = _endless_batches(job, settings, dataset.train, views, batch_plan.global_batch_size)
    return Bench(job, settings, net, batches, dataset.name)


def _endless_batches(job: Job, settings: TrainSettings, examples: Examples, views: Views, batch: int) -> Iterator[Any]:
    """This rank's batches as `train` makes them on all ranks, but never a ragged one: all take the same time."""
    count = len(examples) // batch * batch
    device = job.world.device
    return iter(
        training_batches(
            examples,
            views,
            Sampler(count, batch, settings.seed, Sharding(job.world.rank, job.world.size)),
            first_step=0,
            last_step=2**31,
            device=device if "GPU" in device else "",
        )
    )


class Bench:
    """What this rank does in each way, made when it is first asked for: a trace takes seconds."""

    def __init__(self, job: Job, settings: TrainSettings, net: Net, batches: Iterator[Any], dataset: str) -> None:
        self.job = job
        self.dataset = dataset
        self.settings = settings
        self.net = net
        self.batches = batches
        with tf.device(job.world.device):
            self.in_memory = [tf.identity(part) for part in next(batches)[:3]]
        decay = settings.ema_decay
        self.averages = MovingAverage(net.model.trainable_variables, decay) if decay else None
        self.lookahead = Lookahead(net.model.trainable_variables, 2**31) if settings.lookahead else None
        self._works: dict[tuple[int, str], Work] = {}
        self._traced: dict[int, Callable[..., Any]] = {}

    def time(self, k: int, way: str, steps: int) -> tuple[list[float], float]:
        """Seconds of each step on the first k ranks, and how much of a core this rank took meanwhile; a collective.

        Where a GPU works ahead of its process, only the mean of all steps is known. The other ranks get no seconds.
        """
        collectives.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        seconds: list[float] = []
        if self.job.includes_me(k):
            work = self.work(k, way)
            collectives.barrier(self.job.sets[k])
            work(LEAD_IN_OF_INPUT if way in ("input", "fed") else LEAD_IN)
            at_once = steps if "GPU" in self.job.world.device else 1
            for _ in range(steps // at_once):
                began = time.perf_counter()
                work(at_once)
                seconds.append((time.perf_counter() - began) / at_once)
        collectives.barrier()
        return seconds, (time.process_time() - cpu) / (time.perf_counter() - wall)

    def work(self, k: int, way: str) -> Work:
        """What a way does on the first k ranks."""
        if (k, way) not in self._works:
            self._works[k, way] = self._make(k, way)
        return self._works[k, way]

    def _make(self, k: int, way: str) -> Work:
        ranks = self.job.sets[k]
        if way == "step":
            return self._steps(ranks, k, lambda: self.in_memory)
        if way == "fed":
            return self._steps(ranks, k, lambda: next(self.batches)[:3])
        if way == "compute":
            return self._steps(process_sets.ALONE, 1, lambda: self.in_memory)
        if way == "communication":
            return self._reductions(ranks)
        if way == "input":
            return _repeated(lambda: next(self.batches)[1])
        return self._part(PHASES.index(way))

    def _steps(self, ranks: Any, k: int, batch: Callable[[], Any]) -> Work:
        if k not in self._traced:  # one graph for a group, however it is fed
            self._traced[k] = self.step_over(ranks)
        step = self._traced[k]
        count = tf.constant((self.settings.batch_size or 0) * k)
        real = tf.float64 if self.settings.precision == "float64" else tf.float32
        numbers = count, tf.constant(LEARNING_RATE, real), tf.constant(0.0)
        return _repeated(lambda: step([batch()], *numbers))

    def step_over(self, ranks: Any) -> Callable[..., Any]:
        """The step of training, with gradients summed over a process set."""
        return make_train_step(
            self.net,
            make_optimizer(self.settings, self.net, LEARNING_RATE, ranks),
            weight_decay=self.settings.weight_decay or 0.0,
            label_smoothing=self.settings.label_smoothing or 0.0,
            averages=self.averages,
            lookahead=self.lookahead,
        )

    def _reductions(self, ranks: Any) -> Work:
        """The all-reduce of the gradients alone, as the optimizer does it."""
        optimizer = make_optimizer(self.settings, self.net, LEARNING_RATE, ranks)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        with tf.device(self.job.world.device):
            gradients = [tf.zeros(v.shape, v.dtype) for v in self.net.model.trainable_variables]
        reduce = tf.function(lambda: optimizer.reduce(gradients), autograph=False)
        return _repeated(lambda: reduce()[-1])

    def _part(self, cut: int) -> Work:
        """The forward pass, and `cut` of CUTS parts of the backward pass, from the last layer on."""
        model, variables = self.net.model, self.net.model.trainable_variables
        wanted = [v.value for v in variables[_cut_at(cut, len(variables)) :]]

        @tf.function(autograph=False)
        def part(image: Any, label: Any, weight: Any) -> Any:
            with tf.GradientTape() as tape:
                entropy = cross_entropy(label, model(image, training=True))
                loss = tf.reduce_mean(entropy * tf.cast(weight, entropy.dtype))
            return [loss, *(tape.gradient(loss, wanted) if wanted else [])]

        traced = part.get_concrete_function(*self.in_memory)  # TensorFlow would warn of many functions of one name
        return _repeated(lambda: traced(*self.in_memory)[-1])


def _repeated(once: Callable[[], Any]) -> Work:
    def work(times: int) -> None:
        for _ in range(times):
            result = once()
        np.asarray(result)  # waits for the device

    return work


def _cut_at(cut: int, variables: int) -> int:
    """The first of the variables whose gradients `cut` of CUTS parts of the backward pass compute."""
    return variables - variables * cut // CUTS


def _world_result(k: int, taken: dict[str, list[list[float]]], batch: int, hosts: Sequence[str]) -> WorldResult:
    """From seconds by way, repeat and rank. A group's step takes as long as its slowest rank's."""
    step = [max(by_rank) for by_rank in taken["step"]]
    fed = [max(by_rank) for by_rank in taken["fed"]]
    images = [k * batch / s for s in step]
    alone = [sum(batch / s for s in by_rank) for by_rank in taken["compute"]]
    compute_by_rank = _by_rank(taken["compute"])
    slowest = max(range(k), key=lambda rank: compute_by_rank[rank])
    return WorldResult(
        ranks=k,
        images_per_second=Estimate.of(images),
        images_per_second_alone=Estimate.of(alone),
        efficiency=Estimate.of([a / b for a, b in zip(images, alone, strict=True)]),
        step_seconds=Estimate.of(step),
        compute_seconds=Estimate.of([k * batch / rate for rate in alone]),
        lockstep_seconds=Estimate.of([of_slowest for (of_slowest,) in taken["lockstep"]]),
        communication_seconds=Estimate.of([max(s) for s in taken["communication"]]) if k > 1 else None,
        input_seconds=Estimate.of([statistics.fmean(by_rank) for by_rank in taken["input"]]),
        fed_seconds=Estimate.of(fed),
        input_cost=Estimate.of([a / b - 1 for a, b in zip(fed, step, strict=True)]),
        compute_seconds_by_rank=compute_by_rank,
        input_seconds_by_rank=_by_rank(taken["input"]),
        step_seconds_by_rank=_by_rank(taken["step"]),
        communication_seconds_by_rank=_by_rank(taken["communication"]) if k > 1 else [],
        slowest=SlowestRank(
            rank=slowest,
            host=hosts[slowest],
            behind_median=compute_by_rank[slowest] / statistics.median_low(compute_by_rank) - 1,
        ),
    )


def _by_rank(taken: list[list[float]]) -> list[float]:
    return [statistics.fmean(repeats) for repeats in zip(*taken, strict=True)]


def _phases(net: Net, taken: dict[str, list[list[float]]]) -> Phases:
    """From seconds by phase, repeat and rank: medians over all of them, since the parts are differences."""
    middle = {phase: statistics.median(s for by_rank in seconds for s in by_rank) for phase, seconds in taken.items()}
    forward = middle["forward"]
    # What takes longer cannot be ready earlier: noise may say otherwise.
    ends = np.maximum.accumulate([max(0.0, middle[phase] - forward) for phase in PHASES])
    variables = net.model.trainable_variables
    cuts = [_cut_at(cut, len(variables)) for cut in range(CUTS + 1)]
    order = range(len(variables) - 1, -1, -1)
    ready = np.interp([len(variables) - i for i in order], [len(variables) - cut for cut in cuts], ends)
    gradients = [
        Gradient(name=variables[i].path, bytes=_bytes_of(variables[i]), ready_seconds=at)
        for i, at in zip(order, ready.tolist(), strict=True)
    ]
    whole = forward + float(ends[-1])
    return Phases(
        forward_seconds=forward,
        backward_seconds=float(ends[-1]),
        update_seconds=max(0.0, middle["compute"] - whole),
        gradients=gradients,
    )


def _bytes_of(variable: Any) -> int:
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)
