"""Data-parallel training with TensorFlow and Horovod: one process per GPU or core.

    import hvd_cifar

    summary = hvd_cifar.train(model="mynet.py:build", dataset="folder:/data/birds", epochs=20)

`train` and `evaluate` run on all ranks of the job that this process belongs to, and may be called again and again.
`DistributedOptimizer`, `SyncBatchNormalization` and `broadcast_variables` serve a program with a loop of its own.
Names are loaded when they are first used, so that importing the package does not start TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_cifar.api import evaluate, train
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.distributed import DistributedOptimizer, SyncBatchNormalization, broadcast_variables
    from hvd_cifar.models.recipe import Batch, Recipe
    from hvd_cifar.training.callbacks import Callback

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "Callback",
    "Dataset",
    "DistributedOptimizer",
    "Recipe",
    "SyncBatchNormalization",
    "broadcast_variables",
    "evaluate",
    "train",
]

_HOMES = {
    "Batch": "models.recipe",
    "Callback": "training.callbacks",
    "Dataset": "data.dataset",
    "DistributedOptimizer": "distributed",
    "Recipe": "models.recipe",
    "SyncBatchNormalization": "distributed",
    "broadcast_variables": "distributed",
    "evaluate": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Notes that TensorFlow writes while it is imported are dropped, as on the command line.
    from hvd_cifar.reporting.quiet import quiet_start

    with quiet_start():
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
