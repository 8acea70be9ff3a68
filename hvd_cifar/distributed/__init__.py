"""Data-parallel training over Horovod, for any program of Keras 3 on TensorFlow, which needs these lines:

    import horovod.tensorflow as hvd
    from hvd_cifar.distributed import DistributedOptimizer, broadcast_variables

    hvd.init()
    optimizer = DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size()))
    broadcast_variables(model)

`convert_sync_batch_norm(model)` makes its batch norm layers use the statistics of the global batch, and
`prove_averaging(optimizer)` shows, before training, that gradients reach all ranks.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch_norm import SyncBatchNormalization as SyncBatchNormalization
    from .batch_norm import convert_sync_batch_norm as convert_sync_batch_norm
    from .collectives import broadcast_variables as broadcast_variables
    from .optimizer import DistributedOptimizer as DistributedOptimizer
    from .proof import prove_averaging as prove_averaging

_MODULES = {
    "DistributedOptimizer": "optimizer",
    "SyncBatchNormalization": "batch_norm",
    "convert_sync_batch_norm": "batch_norm",
    "broadcast_variables": "collectives",
    "prove_averaging": "proof",
}


def __getattr__(name: str) -> Any:
    """A name, imported at its first use: importing the package does not start TensorFlow."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
