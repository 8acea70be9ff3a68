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
    installed = importlib.util.find_spec("hvd_cifar")  # without an origin: a folder of that name
    home = INSTALLED if installed and installed.origin and COPY not in sys.modules else COPY
    return importlib.import_module(f"{home}.keras3.{name}")


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
            return part("interface").SyncBatchNormalization
        raise AttributeError(f"module 'horovod.tensorflow' has no attribute {name!r}")

    horovod["__getattr__"] = find
