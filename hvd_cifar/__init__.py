"""Data-parallel training with TensorFlow and Horovod: one process per GPU or core.

    import hvd_cifar

    summary = hvd_cifar.train(model="mynet.py:build", dataset="folder:/data/birds", epochs=20)

`train` and `evaluate` run on all ranks of the job that this process belongs to; a process may call them many times.
`DistributedOptimizer`, `SyncBatchNormalization` and `broadcast_variables` are for a program with its own loop.
Names are loaded when they are first used, so that importing the package does not start TensorFlow.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_cifar.api import evaluate, train
    from hvd_cifar.data.augment import Transforms
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.distributed import DistributedOptimizer, SyncBatchNormalization, broadcast_variables
    from hvd_cifar.errors import TrainingError, UserError
    from hvd_cifar.models.recipe import Batch, Recipe
    from hvd_cifar.optim.schedules import Staircase, ToZero, cosine
    from hvd_cifar.training.callbacks import Callback, Run, StepObserver
    from hvd_cifar.training.evaluate import Evaluation
    from hvd_cifar.training.progress import Progress
    from hvd_cifar.training.ranks import Ranks
    from hvd_cifar.training.state import TrainState

__version__ = "0.3.0"  # CHANGELOG.md says what a number means
__all__ = [
    "Batch",
    "Callback",
    "Dataset",
    "DistributedOptimizer",
    "Evaluation",
    "Progress",
    "Ranks",
    "Recipe",
    "Run",
    "Staircase",
    "StepObserver",
    "SyncBatchNormalization",
    "ToZero",
    "TrainState",
    "TrainingError",
    "Transforms",
    "UserError",
    "broadcast_variables",
    "cosine",
    "evaluate",
    "train",
]

_HOMES = {
    "Batch": "models.recipe",
    "Callback": "training.callbacks",
    "Dataset": "data.dataset",
    "DistributedOptimizer": "distributed",
    "Evaluation": "training.evaluate",
    "Progress": "training.progress",
    "Ranks": "training.ranks",
    "Recipe": "models.recipe",
    "Run": "training.callbacks",
    "Staircase": "optim.schedules",
    "StepObserver": "training.callbacks",
    "SyncBatchNormalization": "distributed",
    "ToZero": "optim.schedules",
    "TrainState": "training.state",
    "TrainingError": "errors",
    "Transforms": "data.augment",
    "UserError": "errors",
    "broadcast_variables": "distributed",
    "cosine": "optim.schedules",
    "evaluate": "api",
    "train": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # TensorFlow logs notes while it is imported; the command line drops them also.
    from hvd_cifar.reporting.quiet import quiet_start

    silent = nullcontext() if "tensorflow" in sys.modules or _HOMES[name] == "errors" else quiet_start()
    with silent:
        found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found  # so that Python does not call this function for the name again
    return found
