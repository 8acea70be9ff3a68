"""All-reduces between two ranks: by MPI itself if the job runs over MPI, else by Horovod's process sets."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

POLL_SECONDS = 2e-3

Reduce = Callable[[NDArray[np.float32]], NDArray[np.float32]]  # this rank's terms [n] -> the sums [n]
Pairs = Sequence[tuple[int, int]]


def by_horovod(device: str, process_set: Any = hvd.global_process_set) -> Reduce:
    """Sums by Horovod over a process set that has this rank as a member; `device` as in `World`."""

    def reduce(terms: NDArray[np.float32]) -> NDArray[np.float32]:
        if process_set.size() == 1:
            return terms
        with tf.device(device):
            return hvd.allreduce(tf.constant(terms), op=hvd.Sum, process_set=process_set).numpy()

    return reduce


def by_mpi(pairs: Pairs) -> Reduce | None:
    """Sums by MPI itself over this rank's pair; None on a rank without a pair. A collective of all ranks."""
    from mpi4py import MPI  # only here: under Gloo its import would try to start MPI

    everyone = MPI.COMM_WORLD
    together = everyone.Ibarrier()
    while not together.Test():  # MPI's own wait polls: it would take a core from pairs that still measure
        time.sleep(POLL_SECONDS)
    mine = next((number for number, pair in enumerate(pairs) if everyone.rank in pair), MPI.UNDEFINED)
    pair = everyone.Split(mine, key=everyone.rank)
    if pair == MPI.COMM_NULL:
        return None

    def reduce(terms: NDArray[np.float32]) -> NDArray[np.float32]:
        sums = np.empty_like(terms)
        pair.Allreduce(terms, sums, op=MPI.SUM)
        return sums

    return reduce
