"""Unlike ranks: updates that round differently on them, and the variables that they take from rank 0 instead.

All ranks apply the same summed gradients. An optimizer such as SGD or Adam computes each value of a weight from that
value's own gradient, with the same bits on CPUs of one architecture. A norm or a product of matrices adds many values.
How these sums are divided depends on the number of threads and on the processor, and so do their last bits. Without a
remedy the weights of unlike ranks would drift apart.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.config import TrainSettings, low_rank_of
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
    named = _differences(world)
    if not named:
        return [], []
    lines = []
    if settings.virtual_shards:
        lines.append(f"note: --virtual-shards gives the same bits only on ranks that are alike: {named}")
    spectral = [one for one in net.model._flatten_layers() if isinstance(one, keras.layers.SpectralNormalization)]
    in_reduction = settings.clip_norm is not None or low_rank_of(settings.compression) > 0
    if not (in_reduction or spectral or _adds_values(optimizer)):
        return [], lines
    variables = [*net.model.trainable_variables, *(v for layer in spectral for v in layer.non_trainable_variables)]
    if in_reduction or not isinstance(inner_of(optimizer), Muon):  # Muon computes its velocities one by one
        variables += [v for v in optimizer.variables if tf.as_dtype(v.dtype).is_floating]
    megabytes = sum(v.value.shape.num_elements() * tf.as_dtype(v.dtype).size for v in variables) / 1e6
    line = f"unlike ranks round the update differently, so all take rank 0's ({megabytes:.1f} MB a step): {named}"
    return variables, [*lines, line]


def _differences(world: World) -> str:
    """Which ranks have which hardware, in words; "" where all have the same. A collective."""
    if world.size == 1:
        return ""
    hosts, host = name_hosts(world)
    found = collectives.all_gather_object((hosts[host], *_hardware(world)))
    if len({facts for _, _, facts in found}) == 1:
        return ""
    return differences(dict.fromkeys((host, words) for host, words, _ in found)) or "processors of the same name differ"


def _adds_values(optimizer: Any) -> bool:
    """Whether a value of a weight depends on other values' gradients, as far as is known."""
    inner = inner_of(optimizer)
    kinds = tuple(getattr(keras.optimizers, name) for name in ONE_BY_ONE)
    own = type(inner).__bases__[-1] if reduction_of(inner) else type(inner)  # its class before `DistributedOptimizer`
    clips = inner.clipnorm is not None or inner.global_clipnorm is not None
    return own not in kinds or clips or any(v.constraint is not None for v in inner._trainable_variables)


def _hardware(world: World) -> tuple[str, str]:
    """What decides how a rank divides its sums: in short words, and in full."""
    if "GPU" in world.device:
        details = tf.config.experimental.get_device_details(tf.config.get_visible_devices("GPU")[0])
        words = str(details.get("device_name", "a GPU"))
        return words, words
    name, features = devices.processor(Path("/proc/cpuinfo"))
    words = f"{world.threads} thread{'s' * (world.threads > 1)} of {name}"
    return words, f"{words} {platform.machine()} {features}"
