"""The choice of gradient buckets, from measurements of the backward pass and the all-reduce before the first step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import buckets, collectives
from hvd_cifar.distributed.batch_norm import local_statistics
from hvd_cifar.distributed.optimizer import reduction_of, set_bucket_bytes
from hvd_cifar.distributed.overlap import CANDIDATES, Backward, Choice, Link, choose
from hvd_cifar.distributed.reduction import Reduction, reduce_gradients, sent_bytes, sent_width
from hvd_cifar.errors import UserError
from hvd_cifar.models import Net
from hvd_cifar.runtime.world import World
from hvd_cifar.training.step import StepSpec, make_share, micro_batch_signature
from hvd_cifar.training.step_times import clock

REPEATS = 3
# Sizes of the two messages to measure; the gradients' size limits the larger one. Both are larger than 4 KiB, since
# smaller messages do not use the ring.
SMALL_BYTES, LARGE_BYTES = 2**14, 2**20


def set_buckets(
    settings: TrainSettings, world: World, net: Net, optimizer: Any, spec: StepSpec, examples: int
) -> list[str]:
    """Give a run's optimizer its buckets. A collective.

    Args:
        settings: resolved.
        net, optimizer, spec: of the step.
        examples: of a rank's micro-batch.

    Returns:
        Lines about what was measured and chosen; none where no message is sent, or overlap cannot save time.
    """
    reduction = reduction_of(optimizer)
    if world.size == 1 or settings.overlap == "off" or reduction is None:  # None: the start-up proof reports it
        return []
    if option := _makes_all_ready_at_once(settings):
        if settings.overlap == "on":
            bucket_bytes = settings.bucket_bytes or CANDIDATES[-1]
            set_bucket_bytes(optimizer, bucket_bytes)
            buckets_of = f"gradients leave in buckets of {_show(bucket_bytes)}"
            return [f"overlap: {buckets_of}; with {option} all are ready at once, and this saves no time"]
        none = f"overlap: none; with {option} all gradients are ready at once, and --bucket-bytes has no effect"
        return [none] if settings.bucket_bytes else []
    # On one host the cores that compute also move the bytes: overlap saves nothing.
    on_one_host = world.local_size == world.size and "GPU" not in world.device
    if settings.overlap == "auto" and on_one_host and settings.bucket_bytes is None:
        return []
    traced = _trace(net, optimizer, spec)
    if len(set(collectives.all_gather_object(tuple(traced.order)))) > 1:
        why = "hosts compute gradients in different orders, since their processors have different kernels"
        if settings.overlap == "on":
            raise UserError(f"--overlap on: {why}; leave it out, or take hosts with the same processors")
        return [f"overlap: none; {why}"]
    if settings.overlap == "on" and settings.bucket_bytes is not None:
        set_bucket_bytes(optimizer, settings.bucket_bytes)
        return [f"overlap: gradients leave in buckets of {_show(settings.bucket_bytes)}"]
    backward, _ = measure_backward(net, optimizer, spec, examples, traced=traced)
    link = _measure_link(reduction, sum(backward.sizes), computes_here="GPU" not in world.device)
    candidates = CANDIDATES if settings.bucket_bytes is None else (settings.bucket_bytes,)
    found = choose(backward, link, candidates, always=settings.overlap == "on")
    set_bucket_bytes(optimizer, found.bucket_bytes)
    return [_describe(backward, link, found)]


def _makes_all_ready_at_once(settings: TrainSettings) -> str:
    """The option that makes all gradients of a step ready at the same time, after backward; "" where there is none."""
    for option, given in (
        ("--gradient-accumulation", settings.gradient_accumulation > 1),
        ("--virtual-shards", settings.virtual_shards),
        ("--precision mixed_float16", settings.precision == "mixed_float16"),  # the loss scale looks at all of them
    ):
        if given:
            return option
    return ""


def _describe(backward: Backward, link: Link, found: Choice) -> str:
    whole = link.seconds(sum(backward.sizes))
    took = f"backward takes {backward.ready[-1] * 1e3:.1f} ms, an all-reduce of all gradients {whole * 1e3:.1f} ms"
    if found.bucket_bytes is None:
        return f"overlap: none; {took}"
    saved = (found.in_one_message - found.seconds) * 1e3
    return f"overlap: buckets of {_show(found.bucket_bytes)}, to save {saved:.1f} ms a step; {took}"


def _show(size: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} bytes"


@dataclass(frozen=True)
class Traced:
    """A rank's backward pass as a graph. Ranks whose processors have other kernels have other graphs.

    Attributes:
        stamps: makes from a micro-batch the times at its start, after the loss and after each gradient.
        order: indices of the gradients and, as the last index, of the loss, in the order in which they are computed.
        sizes: bytes of each gradient in the first message, the one that leaves in buckets; in this order.
    """

    stamps: Any
    order: list[int]
    sizes: list[int]

    @property
    def gradients(self) -> list[int]:
        """The order of the gradients alone."""
        return [index for index in self.order if index < len(self.order) - 1]


def _trace(net: Net, optimizer: Any, spec: StepSpec) -> Traced:
    share_of, statistics_of = make_share(net, optimizer, spec), local_statistics(net.model)
    reduction = reduction_of(optimizer)
    compression = reduction.compression if reduction else "none"
    order: list[int] = []
    sizes: list[int] = []

    @tf.function(input_signature=micro_batch_signature(spec), autograph=False)
    def stamps(image: Any, label: Any, weight: Any, count: Any) -> Any:
        times = [clock()]
        with tf.control_dependencies(times):
            image = tf.identity(image)
        share = share_of(image, label, weight, count, [tf.identity(s.value) for s in statistics_of])
        order[:] = buckets.order([*share.gradients, share.loss])
        in_order = [share.loss, *(share.gradients[i] for i in order if i < len(share.gradients))]
        sizes[:] = [sent_bytes(tensor, compression) for tensor in in_order[1:]]
        for tensor in in_order:
            # A GPU's operation counts as done when it is queued, so the timestamp waits for a copy on the host.
            with tf.device("/CPU:0"):
                seen = tf.identity(tf.reshape(tensor, [-1])[:1])
            with tf.control_dependencies([seen]):
                times.append(clock())
        buckets.gate(times)
        return tf.stack(times), in_order  # in_order also, or TensorFlow prunes what only stamps need

    stamps.get_concrete_function()
    return Traced(stamps, order, sizes)


def measure_backward(
    net: Net, optimizer: Any, spec: StepSpec, examples: int, repeats: int = REPEATS, traced: Traced | None = None
) -> tuple[Backward, list[int]]:
    """Measure the slowest rank's backward pass on a batch of zeros. The net is not changed. A collective.

    Args:
        net, optimizer, spec: of the step.
        examples: of a rank's micro-batch.
        repeats: measured passes; the median counts.
        traced: its graph; None: it is traced here.

    Returns:
        The pass, and the index of each of its gradients in `net.model.trainable_variables`.
    """
    traced = traced or _trace(net, optimizer, spec)
    height, width, channels = spec.image_shape
    batch = (
        tf.zeros([examples, height, width, channels]),
        tf.zeros([examples], tf.int32),
        tf.ones([examples]),
        tf.constant(examples),
    )
    trained = {id(v) for v in net.model.trainable_variables}
    others = [v for v in net.model.variables if id(v) not in trained]
    before = [v.numpy() for v in others]
    traced.stamps(*batch)
    runs = []
    for _ in range(repeats):
        collectives.barrier()
        runs.append(np.diff(traced.stamps(*batch)[0].numpy()).clip(min=0.0))
    for variable, value in zip(others, before, strict=True):
        variable.assign(value)
    forward, *parts = np.max(collectives.all_gather_object(np.median(runs, axis=0)), axis=0)
    return Backward(float(forward), tuple(np.cumsum(parts).tolist()), tuple(traced.sizes)), traced.gradients


def _measure_link(reduction: Reduction, most: int, computes_here: bool) -> Link:
    """Measure two of the optimizer's all-reduces, a small and a large one. A collective.

    Args:
        most: bytes of all gradients, as they are sent.
        computes_here: whether all-reduces take processor time from this rank's computation. The largest time of all
            ranks counts, since every rank must choose the same buckets.
    """
    signature = [tf.TensorSpec([None], tf.float32)]
    reduce = tf.function(lambda x: reduce_gradients([x], reduction)[0], input_signature=signature, autograph=False)
    width = sent_width(tf.float32, reduction.compression)
    small, large = (tf.zeros([size // width]) for size in (SMALL_BYTES, max(2 * SMALL_BYTES, min(most, LARGE_BYTES))))
    found: list[NDArray[Any]] = []
    for message in (small, large):
        times = _time(partial(reduce, message), computes_here)
        found.append(np.max(collectives.all_gather_object(times), axis=0))
    of_small, of_large = found  # [seconds, seconds of the processor]
    per_byte = np.maximum(0.0, of_large - of_small) / (width * int(tf.size(large) - tf.size(small)))
    start = np.maximum(0.0, of_small - per_byte * SMALL_BYTES)
    return Link(float(start[0]), float(per_byte[0]), float(start[1]), float(per_byte[1]))


def _time(once: Callable[[], Any], computes_here: bool) -> tuple[float, float]:
    """Median seconds, and median processor seconds taken from the computation: 0 unless `computes_here`."""
    once()
    taken: list[Sequence[float]] = []
    for _ in range(REPEATS):
        collectives.barrier()
        began, worked = time.perf_counter(), time.process_time()
        np.asarray(once()[-1:])
        taken.append((time.perf_counter() - began, (time.process_time() - worked) * computes_here))
    return statistics.median(wall for wall, _ in taken), statistics.median(cpu for _, cpu in taken)
