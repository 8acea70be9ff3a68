"""Finds and corrects wrong gradients (--verify-every): another rank recomputes a rank's share of a step."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.world import World
from hvd_cifar.training.progress import Progress


class Result(NamedTuple):
    """What a rank computes from its micro-batches, as arrays.

    share: the flattened `Share`.
    state: the variables that the computation may change, after it.
    """

    share: list[Any]
    state: list[Any]

    @property
    def digest(self) -> bytes:
        """SHA-256 of all bits."""
        state = hashlib.sha256()
        for array in (*self.share, *self.state):
            state.update(np.ascontiguousarray(array).tobytes())
        return state.digest()


class Verifier:
    """Every N steps the next rank recomputes one rank's share, and the bits are compared; ranks take turns.

    Two different results do not show which one is wrong. Both ranks then compute again, and so does a third rank if
    there is one. The result of more than half of all computations counts as right.
    """

    def __init__(
        self, world: World, state: Sequence[keras.Variable], every: int, progress: Progress, reporter: Reporter
    ) -> None:
        """`state`: variables that a share depends on or changes, but for the weights."""
        self._world = world
        self._state = state
        self._every = every
        self._progress = progress
        self._reporter = reporter

    @property
    def step(self) -> int:
        """The current step, counted from 1."""
        return self._progress.step + 1

    def share(self, micro_batches: Sequence[MicroBatch], compute: Callable[[Sequence[MicroBatch]], Any]) -> Any:
        """This rank's share of the next step: that of `compute`, unless it is found wrong. A collective.

        Raises:
            TrainingError: on all ranks, where no result has a majority.
        """
        step, size, rank = self.step, self._world.size, self._world.rank
        if size == 1 or step % self._every:
            return self._compute(micro_batches, compute)
        before = self._values()
        share = self._compute(micro_batches, compute)
        owner = step // self._every % size
        checker, third = (owner + 1) % size, (owner + 2) % size
        work = collectives.all_gather_object(
            ([[part.numpy() for part in batch] for batch in micro_batches], before) if rank == owner else None
        )[owner]
        assert work is not None

        def again() -> Result:
            batches, start = work
            kept = self._values()
            self._assign(start)
            result = self._result(self._compute([MicroBatch(*map(tf.constant, b)) for b in batches], compute))
            self._assign(kept)
            return result

        first = self._result(share) if rank == owner else again() if rank == checker else None
        firsts = collectives.all_gather_object(first.digest if first else None)
        if firsts[owner] == firsts[checker]:
            return share
        second = again() if rank in (owner, checker, third) else None
        told = collectives.all_gather_object((self._world.host, second.digest if second else None))
        seconds = [digest for _, digest in told]
        votes = Counter(digest for digest in (*firsts, *seconds) if digest is not None)
        (right, count), *_ = votes.most_common()
        if all(firsts[rank] != seconds[rank] for rank in (owner, checker)):
            raise TrainingError(
                f"the net computes other gradients each time (step {step}): it draws random numbers without a "
                "keras.random.SeedGenerator of its layers, or keeps a state outside of them; give --verify-every 0"
            )
        if 2 * count <= votes.total():
            raise TrainingError(
                f"rank {owner} on {told[owner][0]} and rank {checker} on {told[checker][0]} compute different "
                f"gradients in step {step}, and each repeats its own: one of them is broken, or their processors "
                "are unlike; give --verify-every 0 on unlike processors"
            )
        for wrong in (owner, checker):
            if firsts[wrong] != right:
                self._reporter.warn(
                    f"rank {wrong} on {told[wrong][0]} COMPUTED A WRONG GRADIENT in step {step}: {count} of "
                    f"{votes.total()} computations agree on another one, which the step uses",
                    step,
                )
        if firsts[owner] == right:
            return share
        source = seconds.index(right)
        sent = collectives.all_gather_object(second if rank == source else None)[source]
        if rank != owner or sent is None:
            return share
        self._assign(sent.state)
        return tf.nest.pack_sequence_as(share, [tf.constant(value) for value in sent.share])

    def _compute(self, micro_batches: Sequence[MicroBatch], compute: Callable[[Sequence[MicroBatch]], Any]) -> Any:
        return compute(micro_batches)

    def _result(self, share: Any) -> Result:
        return Result([value.numpy() for value in tf.nest.flatten(share)], self._values())

    def _values(self) -> list[Any]:
        return [variable.numpy() for variable in self._state]

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self._state, values, strict=True):
            variable.assign(value)
