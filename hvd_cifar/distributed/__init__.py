"""The only room that knows Horovod and MPI.

`DistributedOptimizer`, `SyncBatchNormalization` and `broadcast_variables` serve any Keras 3 program on their own:

    import horovod.tensorflow as hvd
    from hvd_cifar.distributed import DistributedOptimizer, broadcast_variables

    hvd.init()
    optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    broadcast_variables(model)

Names are loaded when they are first used, so that importing the package does not start TensorFlow.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvd_cifar.distributed.batch_norm import SyncBatchNormalization
    from hvd_cifar.distributed.collectives import broadcast_variables, prove_averaging
    from hvd_cifar.distributed.optimizer import DistributedOptimizer

__all__ = [
    "DistributedOptimizer",
    "SyncBatchNormalization",
    "broadcast_variables",
    "prove_averaging",
]

_ROOMS = {
    "DistributedOptimizer": "optimizer",
    "SyncBatchNormalization": "batch_norm",
    "broadcast_variables": "collectives",
    "prove_averaging": "collectives",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
