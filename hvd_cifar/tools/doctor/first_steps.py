"""Compares each preset's first training step on the ranks' GPUs with the CPU's; and asks the driver about the GPUs.

Each rank makes the step without an all-reduce, so that a GPU's wrong values appear in the result of its rank alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar import models
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed import collectives, process_sets
from hvd_cifar.distributed.optimizer import DistributedOptimizer
from hvd_cifar.runtime.world import World
from hvd_cifar.tools.doctor.facts import FirstStep, GpuOfRank
from hvd_cifar.training.plan import set_precision
from hvd_cifar.training.step import StepSpec, make_train_step

PRESETS = ("tutorial", "resnet20", "fast")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
SHAPE, CLASSES, EXAMPLES, SEED = (32, 32, 3), 10, 32, 1
ATTEMPTS = 8  # an attempt whose gradients overflow makes no update, and halves float16's loss scale for the next
LARGEST = 1e3  # difference that is reported
COMPUTE_PROCESSES = "--query-compute-apps=pid,gpu_uuid,used_gpu_memory"


def compare(world: World, precisions: Sequence[str]) -> list[FirstStep]:
    """The first steps of all presets on the ranks' devices, beside float32 on the CPU. A collective.

    Returns:
        For each preset and precision the rank that differs most, and by what share of the loss or of the update's norm.
    """
    found = []
    for name in PRESETS:
        right = first_step(name, "float32", "/CPU:0")
        for precision in precisions:
            own = difference(first_step(name, precision, world.device), right)
            of_ranks = collectives.all_gather_object(own)
            worst = max(range(world.size), key=of_ranks.__getitem__)
            found.append(FirstStep(preset=name, precision=precision, rank=worst, difference=of_ranks[worst]))
    return found


def difference(own: tuple[float, Any], right: tuple[float, Any]) -> float:
    """The relative difference of loss or update, the larger one, at most `LARGEST`: JSON has no infinity."""
    (loss, update), (right_loss, right_update) = own, right
    of_update = np.linalg.norm(update - right_update) / np.linalg.norm(right_update)
    found = np.max([of_update, abs(loss / right_loss - 1)])  # unlike max, NaN where either is
    return float(min(found, LARGEST)) if np.isfinite(found) else LARGEST


def first_step(name: str, precision: str, device: str) -> tuple[float, Any]:
    """The loss and the update float32 [parameters] of a preset's first step on this rank.

    Plain gradient descent at rate 1 makes the update: its values are the gradients.
    """
    set_precision(precision, SEED)
    chance = np.random.default_rng(SEED)
    images = chance.standard_normal((EXAMPLES, *SHAPE)).astype(np.float32)
    labels = chance.integers(0, CLASSES, EXAMPLES).astype(np.int32)
    with tf.device(device):
        net = models.build(models.BUILT_IN[name], SHAPE, CLASSES)
        models.adapt(net, lambda: images)
        optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", process_set=process_sets.ALONE)
        if precision == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        variables = net.model.trainable_variables
        optimizer.build(variables)
        step = make_train_step(net, optimizer, StepSpec(image_shape=SHAPE))
        batch = MicroBatch(*map(tf.constant, (images, labels, np.ones(EXAMPLES, np.float32), np.arange(EXAMPLES))))
        before = _flat(variables)
        for _ in range(ATTEMPTS):
            loss = float(step([batch], tf.constant(EXAMPLES), 1.0, tf.zeros([0]))[0])
            update = _flat(variables) - before
            if update.any():
                break
    return loss, update


def _flat(variables: Sequence[keras.Variable]) -> Any:
    return np.concatenate([np.asarray(v.numpy(), np.float32).ravel() for v in variables])


def look_at_gpu() -> GpuOfRank:
    """This rank's GPU as TensorFlow and the driver see it, after it has computed."""
    device = tf.config.get_visible_devices("GPU")[0]
    details = tf.config.experimental.get_device_details(device)
    capability = ".".join(map(str, details.get("compute_capability", ())))
    peak = int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    try:
        said = subprocess.run(
            ["nvidia-smi", COMPUTE_PROCESSES, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        said = ""
    uuid, used = of_process(said, os.getpid())
    return GpuOfRank(name=details.get("device_name", ""), capability=capability, peak=peak, uuid=uuid, used=used)


def of_process(listing: str, pid: int) -> tuple[str, int]:
    """The GPUs (UUIDs, joined by "+") on which the driver sees a process, and the bytes that it holds on them.

    `listing`: lines `PID, UUID, MIB`. In a container the driver's process numbers may be the host's: then ("", 0).
    """
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    mine = [row for row in rows if len(row) == 3 and row[0] == str(pid)]
    return "+".join(row[1] for row in mine), sum(int(row[2]) for row in mine if row[2].isdecimal()) * 2**20
