"""Copies of an elastic job's state after each step, in the shared memory of every host, which outlives lost ranks.

One rank of each host copies the whole state. When ranks start again, they restore the newest whole copy of any host.
Variables that differ between ranks, such as local moving statistics, are then that rank's on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.runtime.shared_memory import NONE, TwoVersions, own_folder, versions_in
from hvd_cifar.training.callbacks import Callback, Run


def make(run: Run) -> Callback | None:
    return ElasticCopies() if run.world.elastic else None


class _Values:
    """Variables as bytes, and back. Those of a type are concatenated, since each fetch has an overhead."""

    def __init__(self, variables: Sequence[Any]) -> None:
        import tensorflow as tf

        variables = [getattr(v, "value", v) for v in variables]
        dtypes = dict.fromkeys(v.dtype for v in variables)
        alike = [[v for v in variables if v.dtype == dtype] for dtype in dtypes]
        self._in_order = [v for of_type in alike for v in of_type]
        self.size = sum(map(_bytes_of, variables))
        self._joined = tf.function(
            lambda: [tf.concat([tf.reshape(v, [-1]) for v in of_type], 0) for of_type in alike], autograph=False
        )

    def pieces(self) -> list[NDArray[np.uint8]]:
        """The current values, as bytes."""
        return [value.numpy().view(np.uint8) for value in self._joined()]

    def assign(self, content: NDArray[np.uint8]) -> None:
        """Set the variables to the values in `content`."""
        at = 0
        for v in self._in_order:
            end = at + _bytes_of(v)
            v.assign(content[at:end].view(v.dtype.as_numpy_dtype).reshape(v.shape))
            at = end


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)


class ElasticCopies(Callback):
    """This host's copies of the state, and how all ranks restore from them."""

    def on_build(self, run: Run) -> None:
        run.progress.fetches_each_step = True  # a copy must not hold what a bad loss has spoilt

    def on_restore(self, run: Run) -> str | None:
        job, self._values = run.world.elastic, _Values(run.state.variables)
        assert job is not None, "the job is elastic"
        folder, size = run.ranks.on_every_rank(lambda: own_folder(job.name)), self._values.size
        is_first = run.world.local_rank == 0
        self._copies = run.ranks.on_every_rank(lambda: TwoVersions(folder, size) if is_first else None)
        newest = run.ranks.all_gather_object(max(versions_in(folder), default=NONE) if self._copies else NONE)
        found = max(newest)
        if found <= int(run.state.step.numpy()):
            return None
        root = newest.index(found)
        if self._copies and run.world.rank == root:
            self._values.assign(self._copies.read(found))
        run.state.broadcast(root)
        return "memory"

    def on_step(self, run: Run) -> None:
        run.tell("before_save")
        if self._copies:
            self._copies.write(run.step, self._values.pieces())
