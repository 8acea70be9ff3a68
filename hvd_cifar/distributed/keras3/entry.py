"""What Horovod does under Keras 3. Set-up lays this file into Horovod's wheel, as `horovod/keras3.py`.

The work is done by the library `hvd_cifar.distributed`: where the package is installed by that one, else by the copy
in the wheel, `horovod/_distributed`. So a process never has both, whose classes would not know each other.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from typing import Any

INSTALLED, COPY = "hvd_cifar.distributed", "horovod._distributed"


@functools.cache  # AutoGraph, in a tf.function of the user's, leaves what is cached alone
def part(name: str) -> Any:
    """A module of the library's folder `keras3`."""
    return importlib.import_module(f"{_home()}.keras3.{name}")


def _home() -> str:
    installed = importlib.util.find_spec("hvd_cifar")  # without an origin: a folder of that name
    return INSTALLED if installed and installed.origin and COPY not in sys.modules else COPY


def is_present() -> bool:
    """Whether `tf.keras` is Keras 3, and not the legacy package of Keras 2."""
    import tensorflow as tf

    return int(getattr(tf.keras, "__version__", "2").split(".")[0]) >= 3  # the legacy package gives no version here


def is_optimizer(thing: Any) -> bool:
    """Whether something is an optimizer of Keras 3, also where `tf.keras` is Keras 2."""
    keras = sys.modules.get("keras")
    return keras is not None and hasattr(keras, "Variable") and isinstance(thing, keras.optimizers.Optimizer)


def complete(horovod: dict[str, Any]) -> None:
    """Make the names of `horovod.tensorflow` serve Keras 3."""
    if not is_present():
        return
    part("values").complete(horovod)
    horovod.pop("SyncBatchNormalization")

    def find(name: str) -> Any:  # at its first use: its module imports horovod.tensorflow
        if name == "SyncBatchNormalization":
            return part("batch_norm").SyncBatchNormalization
        raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")

    horovod["__getattr__"] = find


def backend(of_keras: Any) -> Any:
    """The backend for Horovod's callbacks: that of Keras 2, or what serves them under Keras 3."""
    return part("callbacks").Backend if is_present() else of_keras


def to_broadcast(variables: Any) -> Any:
    """What `broadcast_variables` broadcasts of a list of variables."""
    return part("values").to_broadcast(variables) if is_present() else variables


def corrects_momentum(optimizer: Any, old_rate: float, new_rate: float) -> bool:
    """Correct a Keras 3 optimizer's momentum for a step; False for any other optimizer."""
    return is_optimizer(optimizer) and part("callbacks").correct_momentum(optimizer, old_rate, new_rate)


def build(optimizer: Any, model: Any) -> None:
    """Build an optimizer of Keras 3 that is not yet."""
    if is_optimizer(optimizer):
        part("callbacks").build(optimizer, model)


def have_weights(model: Any) -> bool:
    """Whether Keras 3 has made the model's weights, on every rank. A collective under Keras 3."""
    return is_optimizer(model.optimizer) and bool(part("callbacks").have_weights(model))


def any_path(weights_only: bool) -> str | None:
    """What Keras 3's ModelCheckpoint accepts as a path where there is none yet."""
    return ("best.weights.h5" if weights_only else "best.keras") if is_present() else None
