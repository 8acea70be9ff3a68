"""Copies of an elastic job's state after each step, in the shared memory of every host, which outlives lost ranks.

One rank of each host copies the whole state. Every rank also copies the variables that differ between ranks, such as
batch norm's moving statistics. When ranks start again, they restore the newest whole copy of any host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.fields import MOST_STEPS
from hvd_cifar.runtime.shared_memory import NONE, TwoSlots, own_folder
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.runtime.environment import ElasticJob

STATE = "state"
LARGE_BYTES = 2**18
OWN = "own-"  # prefix; the local rank follows


def make(run: Run) -> Callback | None:
    """The copies of an elastic job."""
    return ElasticCopies(run.world.elastic) if run.world.elastic else None


class _Values:
    """Variables as bytes, and back. Small ones are concatenated by type, since each fetch has an overhead."""

    def __init__(self, variables: Sequence[Any]) -> None:
        import tensorflow as tf

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


class ElasticCopies(Callback):
    """This rank's copies of the state, and how all ranks restore from them."""

    def __init__(self, job: ElasticJob) -> None:
        self.job = job

    def on_build(self, run: Run) -> None:
        """Have each step's results fetched: the copy counts skipped steps. Stop where the job only saves."""
        run.progress.fetches_each_step = True
        run.progress.stop_requested |= self.job.saves_only

    def on_restore(self, run: Run) -> str | None:
        """Restore the newest whole copy on all ranks, if it is later than the present state.

        Raises:
            UserError: where the host's shared memory has no room.
        """
        world = run.world
        self._rank, self._local_size = world.rank, world.local_size
        self._all, self._own = _Values(run.state.variables), _Values(run.state.own)
        self._folder = run.ranks.on_every_rank(lambda: own_folder(self.job.name))
        self._of_own, self._of_all = run.ranks.on_every_rank(
            lambda: (
                self._file(f"{OWN}{world.local_rank}", self._own) if self._own.variables else None,
                self._file(STATE, self._all) if world.local_rank == 0 else None,
            )
        )
        return "memory" if self._restore(run) else None

    def on_step(self, run: Run) -> None:
        """Copy the state of this step."""
        run.tell("before_save")
        version = self._version(run)
        if self._of_own:
            self._of_own.write(version, self._own.pieces())
        if self._of_all:
            self._of_all.write(version, self._all.pieces(), self._local_size)

    def on_rollback(self, run: Run) -> None:
        """Forget the copies, which are of discarded steps."""
        for slots in (self._of_all, self._of_own):
            if slots:
                slots.clear()

    def _file(self, name: str, values: _Values) -> TwoSlots:
        return TwoSlots(self._folder / name, values.layout, values.size)

    def _version(self, run: Run) -> int:
        """A number that grows with each step, and with each rollback even though its step is an earlier one."""
        return int(run.state.rollbacks.numpy()) * (MOST_STEPS + 1) + int(run.state.step.numpy())

    def _restore(self, run: Run) -> bool:
        """Restore the newest whole copy on all ranks, if it is later than the present state. A collective.

        A copy that all hosts have is preferred to one that is a step newer: only this has every rank's own variables.
        """
        whole = run.ranks.gather(self._whole())
        there = [set(versions) for versions in whole if versions]
        if not there:
            return False
        newest = max(set.union(*there))
        # A host that was away has older copies.
        present = [versions for versions in there if not versions.isdisjoint((newest, newest - 1))]
        found = max(set.intersection(*present) or {newest})
        if found <= self._version(run):
            return False
        root = next(rank for rank, versions in enumerate(whole) if found in versions)
        is_here = self._of_all is not None and found in whole[self._rank]
        if self._of_all and is_here:
            for variable, value in zip(self._all.variables, self._all.arrays(self._of_all.read(found)), strict=True):
                variable.assign(value)
        run.state.broadcast(root)
        self._average_own(run, found if is_here else None)
        return True

    def _whole(self) -> list[int]:
        """The versions of which this host has the state and the own variables of all its ranks."""
        if not self._of_all:
            return []
        held = [version for version in self._of_all.versions if version != NONE]
        return [v for v in held if all(slots and v in slots.versions for slots in self._own_files(v))]

    def _own_files(self, version: int) -> list[TwoSlots | None]:
        """The copies of the own variables of the ranks that this host had; None: a rank has none."""
        if not self._of_all or not self._own.variables:
            return []
        names = [f"{OWN}{local_rank}" for local_rank in range(self._of_all.note(version))]
        return [self._file(name, self._own) if (self._folder / name).exists() else None for name in names]

    def _average_own(self, run: Run, version: int | None) -> None:
        """Set the variables that differ between ranks to the mean of all ranks' copies; None: this rank has no part."""
        import tensorflow as tf

        if not self._own.variables:
            return
        found = [slots for slots in self._own_files(version) if slots] if version is not None else []
        parts = [self._own.arrays(slots.read(version)) for slots in found if version is not None]
        (copies,) = run.ranks.sums([len(parts)])
        for i, variable in enumerate(self._own.variables):
            # In float32 where it is bfloat16, which Horovod does not add.
            wide = tf.float32 if variable.dtype == tf.bfloat16 else variable.dtype
            kind = wide.as_numpy_dtype
            total = sum((part[i].astype(kind) for part in parts), np.zeros(variable.shape, kind))
            mean = run.ranks.sum(tf.constant(total)) / copies
            variable.assign(tf.cast(mean, variable.dtype))
