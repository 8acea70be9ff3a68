"""Compares each preset's first training step on the ranks' GPUs with the CPU's.

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
from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.world import World
from hvd_cifar.tools.doctor.facts import FirstStep

PRESETS = ("tutorial", "resnet20", "fast")
PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
SHAPE, CLASSES, EXAMPLES, SEED = (32, 32, 3), 10, 32, 1
LOSS_SCALE = 1024.0  # so that small gradients do not become 0 in float16
LARGEST = 1e3  # difference that is reported


def compare(world: World, precisions: Sequence[str]) -> list[FirstStep]:
    """The first steps of all presets on the ranks' devices, beside float32 on the CPU. A collective.

    Returns:
        For each preset and precision the rank that differs most, and by what share of the loss or the gradients' norm.
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
    """The relative difference of loss or gradients, the larger one, at most `LARGEST`: JSON has no infinity."""
    (loss, gradients), (right_loss, right_gradients) = own, right
    of_gradients = np.linalg.norm(gradients - right_gradients) / np.linalg.norm(right_gradients)
    found = np.max([of_gradients, abs(loss / right_loss - 1)])  # unlike max, NaN where either is
    return float(min(found, LARGEST)) if np.isfinite(found) else LARGEST


def first_step(name: str, precision: str, device: str) -> tuple[float, Any]:
    """The loss of a preset's first step on this rank, and its gradients, float32 [parameters]."""
    keras.utils.clear_session(free_memory=False)
    keras.config.set_dtype_policy(precision)
    keras.utils.set_random_seed(SEED)
    chance = np.random.default_rng(SEED)
    images = chance.standard_normal((EXAMPLES, *SHAPE)).astype(np.float32)
    labels = chance.integers(0, CLASSES, EXAMPLES).astype(np.int32)
    with tf.device(device):
        net = models.build(models.BUILT_IN[name], SHAPE, CLASSES)
        models.adapt(net, lambda: images)
        variables = [variable.value for variable in net.model.trainable_variables]

        @tf.function(autograph=False)
        def step(images: Any, labels: Any) -> tuple[Any, list[Any]]:
            with tf.GradientTape() as tape:
                logits = tf.cast(net.model(images, training=True), tf.float32)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
                scaled = loss * LOSS_SCALE
            return loss, tape.gradient(scaled, variables)

        loss, gradients = step(tf.constant(images), tf.constant(labels))
    return float(loss), np.concatenate([np.asarray(g, np.float32).ravel() for g in gradients]) / LOSS_SCALE


def gpus_of_this_process() -> list[str]:
    """The UUIDs of the GPUs on which the driver sees this process."""
    words = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return of_process(said, os.getpid())


def of_process(listing: str, pid: int) -> list[str]:
    """The GPUs of a process in lines `PID, UUID`. In a container the driver's numbers may be the host's: then none."""
    rows = [[part.strip() for part in line.split(",")] for line in listing.splitlines()]
    return [row[1] for row in rows if len(row) == 2 and row[0] == str(pid)]
