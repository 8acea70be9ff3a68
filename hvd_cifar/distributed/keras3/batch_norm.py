"""`hvd.SyncBatchNormalization` for Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from ..batch_norm import Synchronized


@keras.saving.register_keras_serializable("horovod")
class SyncBatchNormalization(Synchronized, keras.layers.BatchNormalization):
    """Keras's batch normalisation, with its defaults, by the statistics of all ranks' examples in training.

    As Horovod's for Keras 2, except that ranks of unequal batches count by their examples, and not alike.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA cannot compile the all-reduce
