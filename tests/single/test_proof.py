"""The tolerance of the start-up proof, on more ranks than a machine has."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from hvd_cifar.distributed.proof import TOLERANCE_OF_BFLOAT16, gradients_of


def test_the_proof_allows_what_bfloat16_rounds_on_any_number_of_ranks() -> None:
    worst, bfloat16 = 0.0, tf.bfloat16.as_numpy_dtype
    for size in range(1, 1025):
        shares = (gradients_of(size) / size).astype(np.float32).astype(bfloat16)
        summed = shares.astype(np.float32).sum(axis=0).astype(bfloat16).astype(np.float64)
        worst = max(worst, np.abs(summed / gradients_of(size).mean(axis=0) - 1).max())
    assert 0.002 < worst < TOLERANCE_OF_BFLOAT16
