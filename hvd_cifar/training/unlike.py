"""Unlike ranks: updates that round differently on them, and the variables that they take from rank 0 instead.

All ranks apply the same summed gradients. An optimizer such as SGD or Adam computes each value of a weight from that
value's own gradient, with the same bits on processors of one kind (x86, ARM, GPU). A norm or a product of matrices adds
many values. How these sums are divided depends on the number of threads and on the processor, and so do their last
bits. Without a remedy the weights of unlike ranks would drift apart.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.optimizer import inner_of, reduction_of
from hvd_cifar.models import Net
from hvd_cifar.optim.muon import Muon
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.world import World
from hvd_cifar.training.sources import differences, name_hosts

# Keras's optimizers that compute each value of a weight from that value's own gradient.
ONE_BY_ONE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")


def taken_from_root(settings: TrainSettings, world: World, net: Net, optimizer: Any) -> tuple[list[Any], list[str]]:
    """What all ranks take from rank 0 after each update. A collective.

    Args:
        settings: resolved.
        optimizer: distributed and built.

    Returns:
        The variables, and lines about unlike ranks; both empty where ranks are alike.
    """
    named, same_kind = _differences(world)
    if not named:
        return [], []
    lines = []
    if settings.virtual_shards:
        lines.append(f"note: --virtual-shards gives the same bits only on ranks that are alike: {named}")
    spectral = [one for one in net.model._flatten_layers() if isinstance(one, keras.layers.SpectralNormalization)]
    inner = inner_of(optimizer)
    own = type(inner).__bases__[-1] if reduction_of(inner) else type(inner)  # its class before `DistributedOptimizer`
    kinds = tuple(getattr(keras.optimizers, name) for name in ONE_BY_ONE)
    clips = inner.clipnorm is not None or inner.global_clipnorm is not None  # --clip-norm also
    all_differs = clips or not same_kind
    constrained = any(v.constraint is not None for v in net.model.trainable_variables)
    if own in kinds and not (all_differs or spectral or constrained):
        return [], lines
    variables = [*net.model.trainable_variables, *(v for layer in spectral for v in layer.non_trainable_variables)]
    if all_differs or own is not Muon:  # Muon computes its velocities one by one
        variables += [v for v in optimizer.variables if tf.as_dtype(v.dtype).is_floating]
    megabytes = sum(v.value.shape.num_elements() * tf.as_dtype(v.dtype).size for v in variables) / 1e6
    line = f"unlike ranks round the update differently, so all take rank 0's ({megabytes:.1f} MB a step): {named}"
    return variables, [*lines, line]


def _differences(world: World) -> tuple[str, bool]:
    """Which ranks have which hardware, in words, "" where all have the same; and whether it is of one kind at least.

    A collective.
    """
    if world.size == 1:
        return "", True
    hosts, host = name_hosts(world)
    found = collectives.all_gather_object((hosts[host], *_hardware(world)))
    if len({(kind, facts) for _, _, kind, facts in found}) == 1:
        return "", True
    words = differences(dict.fromkeys((host, words) for host, words, _, _ in found))
    return words or "processors of the same name differ", len({kind for _, _, kind, _ in found}) == 1


def _hardware(world: World) -> tuple[str, str, str]:
    """What decides how a rank rounds: in short words; its kind; and in full."""
    if "GPU" in world.device:
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        words = str(details.get("device_name", "a GPU"))
        return words, "GPU", words
    name, features = devices.processor(Path("/proc/cpuinfo"))
    words = f"{world.threads} thread{'s' * (world.threads > 1)} of {name}"
    return words, platform.machine(), f"{words} {features}"
