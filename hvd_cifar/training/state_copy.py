"""Copies of an elastic job's state after each step, in the shared memory of every host, which outlives lost ranks.

One rank of each host copies the whole state. Every rank also copies the variables that differ between ranks, such as
batch norm's moving statistics. When ranks start again, they restore the newest whole copy of any host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.distributed import collectives
from hvd_cifar.runtime.shared_memory import NONE, TwoSlots, own_folder
from hvd_cifar.runtime.world import World
from hvd_cifar.training.callbacks import Callback, Checkpointer
from hvd_cifar.training.checkpoint import State
from hvd_cifar.training.progress import Run

STATE = "state"
LARGE_BYTES = 2**18
OWN = "own-"  # prefix; the local rank follows


class _Values:
    """Variables as bytes, and back. Small ones are concatenated by type, since each fetch has an overhead."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = [getattr(v, "value", v) for v in variables]
        self._large = [v for v in self.variables if _bytes_of(v) >= LARGE_BYTES]
        small = [v for v in self.variables if _bytes_of(v) < LARGE_BYTES]
        self._alike = [[v for v in small if v.dtype == dtype] for dtype in dict.fromkeys(v.dtype for v in small)]
        self._in_order = [v for alike in self._alike for v in alike] + self._large
        described = [(v.dtype.name, tuple(v.shape)) for v in self._in_order]
        self.layout = hashlib.sha256(repr(described).encode()).digest()
        self.size = sum(map(_bytes_of, self.variables))
        self._joined = tf.function(
            lambda: [tf.concat([tf.reshape(v, [-1]) for v in alike], 0) for alike in self._alike], autograph=False
        )

    def pieces(self) -> list[NDArray[np.uint8]]:
        """The current values, as bytes."""
        values = [*self._joined(), *(v.read_value() for v in self._large)]
        return [value.numpy().reshape(-1).view(np.uint8) for value in values]

    def arrays(self, content: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """The values in `content`, in the order of `variables`."""
        found, at = {}, 0
        for v in self._in_order:
            end = at + _bytes_of(v)
            found[id(v)] = content[at:end].view(v.dtype.as_numpy_dtype).reshape(v.shape)
            at = end
        return [found[id(v)] for v in self.variables]


def _bytes_of(variable: Any) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)


class StateCopy:
    """This rank's copies of the state, and how all ranks restore from them."""

    def __init__(self, job: str, state: State, own: Sequence[Any], world: World) -> None:
        """`own`: the variables that differ between ranks. A collective.

        Raises:
            UserError: where the host's shared memory has no room.
        """
        self.state = state
        self._all, self._own = _Values(state.variables), _Values(own)
        self._folder = collectives.on_every_rank(lambda: own_folder(job))
        self._of_own, self._of_all = collectives.on_every_rank(
            lambda: (
                self._file(f"{OWN}{world.local_rank}", self._own) if own else None,
                self._file(STATE, self._all) if world.local_rank == 0 else None,
            )
        )

    def _file(self, name: str, values: _Values) -> TwoSlots:
        return TwoSlots(self._folder / name, values.layout, values.size)

    def write(self, step: int) -> None:
        """Copy the current state, which is that after `step`."""
        if self._of_own:
            self._of_own.write(step, self._own.pieces())
        if self._of_all:  # last: when this one is whole, so is the other
            self._of_all.write(step, self._all.pieces())

    def forget(self) -> None:
        """Drop this rank's copies."""
        for slots in (self._of_all, self._of_own):
            if slots:
                slots.clear()

    def restore(self, step: int) -> int | None:
        """Restore the newest copy on all ranks, if it is later than `step`. A collective.

        Returns:
            The step of the copy; None where there is no later one.
        """
        newest = collectives.all_gather_object(max(self._of_all.steps) if self._of_all else NONE)
        found = max(newest)
        if found <= step:
            return None
        root = newest.index(found)
        if self._of_all and found in self._of_all.steps:
            for variable, value in zip(self._all.variables, self._all.arrays(self._of_all.read(found)), strict=True):
                variable.assign(value)
        collectives.broadcast_variables(self.state.variables, root)
        self._average_own(found)
        return found

    def _average_own(self, step: int) -> None:
        """Set the variables that differ between ranks to the mean of all copies of a step."""
        if not self._own.variables:
            return
        parts = []
        if self._of_all:  # one rank of each host
            for path in sorted(self._folder.glob(f"{OWN}*")):
                slots = self._file(path.name, self._own)
                if step in slots.steps:
                    parts.append(self._own.arrays(slots.read(step)))
        (copies,) = collectives.all_reduce_sums([len(parts)])
        for i, variable in enumerate(self._own.variables):
            total = sum((part[i] for part in parts), np.zeros(variable.shape, variable.dtype.as_numpy_dtype))
            variable.assign(collectives.all_reduce_in_graph(tf.constant(total)) / copies)


class Copier(Callback):
    """Copies the state after each step."""

    def __init__(self, copy: StateCopy, checkpointer: Checkpointer) -> None:
        self.copy = copy
        self.checkpointer = checkpointer

    def on_step(self, run: Run) -> None:
        """Copy the state of this step."""
        self.checkpointer.mark()
        self.copy.write(run.step)

    def on_rollback(self, run: Run) -> None:
        """Forget the copies, which are of discarded steps."""
        self.copy.forget()
