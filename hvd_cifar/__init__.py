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
    from hvd_cifar.api import evaluate as evaluate
    from hvd_cifar.api import train as train
    from hvd_cifar.data.augment import Transforms as Transforms
    from hvd_cifar.data.dataset import Dataset as Dataset
    from hvd_cifar.distributed import DistributedOptimizer as DistributedOptimizer
    from hvd_cifar.distributed import SyncBatchNormalization as SyncBatchNormalization
    from hvd_cifar.distributed import broadcast_variables as broadcast_variables
    from hvd_cifar.errors import TrainingError as TrainingError
    from hvd_cifar.errors import UserError as UserError
    from hvd_cifar.models.recipe import Batch as Batch
    from hvd_cifar.models.recipe import Recipe as Recipe
    from hvd_cifar.optim.schedules import Staircase as Staircase
    from hvd_cifar.optim.schedules import ToZero as ToZero
    from hvd_cifar.optim.schedules import cosine as cosine
    from hvd_cifar.training.callbacks import Callback as Callback
    from hvd_cifar.training.callbacks import Run as Run
    from hvd_cifar.training.callbacks import StepObserver as StepObserver
    from hvd_cifar.training.evaluate import Evaluation as Evaluation
    from hvd_cifar.training.progress import Progress as Progress
    from hvd_cifar.training.state import TrainState as TrainState

__version__ = "0.3.0"  # CHANGELOG.md says what a number means

# The public names, by the modules that hold them.
_NAMES = {
    "api": ("evaluate", "train"),
    "data.augment": ("Transforms",),
    "data.dataset": ("Dataset",),
    "distributed": ("DistributedOptimizer", "SyncBatchNormalization", "broadcast_variables"),
    "errors": ("TrainingError", "UserError"),
    "models.recipe": ("Batch", "Recipe"),
    "optim.schedules": ("Staircase", "ToZero", "cosine"),
    "training.callbacks": ("Callback", "Run", "StepObserver"),
    "training.evaluate": ("Evaluation",),
    "training.progress": ("Progress",),
    "training.state": ("TrainState",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}
__all__ = sorted(_HOMES)


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
