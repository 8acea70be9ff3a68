"""`benchmark step --emulate-compute`: a step whose computation is a sleep, to measure many ranks on few cores.

Gradients have the net's sizes and go the way of training: buckets, with the loss beside them, all-reduce, update.
A sleeping rank leaves its core alone, so that a machine can run more ranks than it has cores.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import tensorflow as tf

from hvd_cifar.config import BenchmarkStepSettings
from hvd_cifar.distributed import buckets, collectives, process_sets
from hvd_cifar.distributed.optimizer import apply_and_sum, inner_of, set_bucket_bytes
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import direct_mpi
from hvd_cifar.tools.benchmark.job import Job, facts_of, memory_of_this_process
from hvd_cifar.tools.benchmark.results import EmulatedResult, EmulatedWorld, Estimate
from hvd_cifar.tools.benchmark.step import LEAD_IN, LEARNING_RATE, bytes_of, train_settings
from hvd_cifar.training.work import make_net, make_optimizer, prepare

LOSS_BYTES = 8  # the loss and the request to stop

# What a turn measures. "message" and "value" are all-reduces alone, of the gradients and of the loss; "ring" is MPI's.
WAYS = ("alone", "step", "message", "value", "ring")


@dataclass(frozen=True)
class Turn:
    """A rank's part of a turn.

    Attributes:
        seconds: of each step; empty on a rank that waited.
        processor: processor seconds of a step.
        bytes, packets: sent by the host's network cards in a step; local rank 0 has them, the others have 0.
    """

    seconds: list[float]
    processor: float
    bytes: float
    packets: float


def measure(job: Job, options: BenchmarkStepSettings) -> EmulatedResult:
    """Measure on all groups of the job; a collective, and every rank returns the same."""
    assert options.emulate_compute is not None
    work = prepare(train_settings(options), job.world)
    net = collectives.on_every_rank(lambda: make_net(work))
    variables = net.model.trainable_variables
    ways = [way for way in WAYS if way != "ring" or direct_mpi.why_not() is None]
    worlds = []
    for k, ranks in job.sets.items():
        ring = direct_mpi.make_sum(k) if "ring" in ways else None
        once: dict[str, Callable[[], Any]] = {}
        if job.includes_me(k):
            for way, among in (("alone", process_sets.ALONE), ("step", ranks)):
                optimizer = make_optimizer(work, net, LEARNING_RATE, among)
                set_bucket_bytes(optimizer, options.bucket_bytes)
                once[way] = make_step(variables, optimizer, options.emulate_compute, options.bucket_bytes)
            undivided = make_optimizer(work, net, LEARNING_RATE, ranks)
            once |= _messages(variables, inner_of(undivided), ring)
        taken: dict[str, list[list[Turn]]] = defaultdict(list)
        for repeat in range(options.repeats + 1):
            for way in ways if repeat % 2 else ways[::-1]:
                found = collectives.all_gather_object(_time(job, k, once.get(way), options.steps))
                if repeat:  # the first one traces and warms up
                    taken[way].append(found[:k])
        worlds.append(_world(k, taken))
        if job.world.is_root:
            terminal.say(f"{k} ranks measured")
    return EmulatedResult(
        facts=facts_of(job.world),
        model=options.model,
        gradients=[bytes_of(v) for v in variables[::-1]],
        bucket_bytes=options.bucket_bytes,
        emulated_seconds=options.emulate_compute,
        steps=options.steps,
        worlds=worlds,
        memory_by_rank=collectives.all_gather_object(memory_of_this_process()),
    )


def make_step(variables: list[Any], optimizer: Any, seconds: float, bucket_bytes: int | None) -> Callable[[], Any]:
    """A step that sleeps where the real one computes; each bucket of gradients is ready after its part of the sleep.

    Args:
        variables: to be updated, by gradients of zeros.
        optimizer: distributed, built for them, with buckets of `bucket_bytes`.
        seconds: of all sleeps together.

    Returns:
        A function () -> float [2] that returns after the update: the sums of the loss, 0, and of requests.
    """
    backwards = variables[::-1]
    sizes = [LOSS_BYTES, *map(bytes_of, backwards)]  # the loss is ready before all gradients

    @tf.function(autograph=False)
    def step() -> Any:
        slept = tf.constant(0.0)
        loss = tf.stack([slept, slept])
        gradients = []
        for bucket in buckets.plan(sizes, bucket_bytes):
            part = seconds * sum(sizes[i] for i in bucket) / sum(sizes)
            slept = tf.ensure_shape(tf.numpy_function(_sleep, [slept, part], tf.float32), [])
            ready = [backwards[i - 1] for i in bucket if i > 0]
            gradients += [tf.cast(tf.fill(v.shape, slept), v.dtype) for v in ready]  # zeros, after the sleep
        return apply_and_sum(optimizer, gradients, backwards, [loss])[0]

    return step


def _sleep(after: Any, seconds: Any) -> Any:
    time.sleep(float(seconds))
    return np.float32(after)


def _messages(variables: list[Any], optimizer: Any, ring: Any) -> dict[str, Callable[[], Any]]:
    """All-reduces alone, by way."""
    gradients = [tf.zeros(v.shape, v.dtype) for v in variables]
    # All sums: TensorFlow leaves out an all-reduce whose sum the graph does not return.
    message = tf.function(lambda: optimizer.reduce(gradients), autograph=False)
    value = tf.function(lambda: optimizer.reduce([tf.zeros([2])])[0], autograph=False)
    terms = np.zeros(sum(map(bytes_of, variables)) // 4, np.float32)
    sums = np.empty_like(terms)
    return {"message": lambda: message()[-1], "value": value, "ring": lambda: ring(terms, sums)}


def _time(job: Job, k: int, once: Callable[[], Any] | None, steps: int) -> Turn:
    """Take the time on the first k ranks, while the others wait; a collective."""
    collectives.barrier()
    if once is None:
        collectives.barrier()
        return Turn([], 0.0, 0.0, 0.0)
    for _ in range(LEAD_IN):
        once()
    seconds = []
    processor, sent = time.process_time(), _sent(job)
    for _ in range(steps):
        began = time.perf_counter()
        np.asarray(once())
        seconds.append(time.perf_counter() - began)
    processor, after = time.process_time() - processor, _sent(job)
    collectives.barrier()
    return Turn(seconds, processor / steps, (after[0] - sent[0]) / steps, (after[1] - sent[1]) / steps)


def _sent(job: Job) -> tuple[int, int]:
    """Bytes and packets that this host has sent; 0 where the local rank is not 0."""
    if job.world.local_rank:
        return 0, 0
    cards = [count for name, count in psutil.net_io_counters(pernic=True).items() if name != "lo"]
    return sum(count.bytes_sent for count in cards), sum(count.packets_sent for count in cards)


def _world(k: int, taken: dict[str, list[list[Turn]]]) -> EmulatedWorld:
    """From turns by way, repeat and rank. A repeat is the median of its steps, since other work can delay one."""
    slowest = {
        way: [statistics.median(map(max, zip(*(turn.seconds for turn in turns), strict=True))) for turns in repeats]
        for way, repeats in taken.items()
    }
    processor = {way: [statistics.fmean(turn.processor for turn in turns) for turns in taken[way]] for way in taken}
    rest = [step - alone for step, alone in zip(slowest["step"], slowest["alone"], strict=True)]
    return EmulatedWorld(
        ranks=k,
        step_seconds=Estimate.of(slowest["step"]),
        alone_seconds=Estimate.of(slowest["alone"]),
        rest_seconds=Estimate.of(rest),
        message_seconds=Estimate.of(slowest["message"]),
        value_seconds=Estimate.of(slowest["value"]),
        ring_seconds=Estimate.of(slowest["ring"]) if "ring" in slowest else None,
        step_processor=Estimate.of(processor["step"]),
        alone_processor=Estimate.of(processor["alone"]),
        sent_bytes=statistics.fmean(max(turn.bytes for turn in turns) for turns in taken["step"]),
        sent_packets=statistics.fmean(max(turn.packets for turn in turns) for turns in taken["step"]),
    )
