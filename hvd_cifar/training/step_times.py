"""Each rank's own time and its waiting time in the steps, taken inside the step's graph."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

T = TypeVar("T")


class Times(NamedTuple):
    """Seconds of some steps of a rank.

    compute: from asking for the batch to this rank's last gradient. wait: from there until the sums over all ranks are
    there: for slower ranks, and for the network.
    """

    steps: int
    compute: float
    wait: float


def _now() -> Any:
    return np.float64(time.time())


class StepTimes:
    """Notes when a step's gradients and their sums are ready.

    Two clock readings and two additions in the graph, on the CPU, which nothing else waits for. On a GPU the readings
    tell when work is queued, not when it is done.
    """

    def __init__(self, deterministic: bool) -> None:
        """`deterministic`: TensorFlow then refuses to read a clock, and Python reads it."""
        self._deterministic = deterministic
        self._origin = time.time()
        with tf.device("/CPU:0"):
            # Sums of times since `_origin`, and numbers of steps: of gradients, and of their sums.
            self._sums = tf.Variable([0.0] * 4, dtype=tf.float64, trainable=False, name="step_times")
        self._begun, self._steps = 0.0, 0
        self._taken = Times(0, 0.0, 0.0)

    def each(self, batches: Iterable[T]) -> Iterator[T]:
        """The batches; a step begins when its batch is asked for."""
        iterator = iter(batches)
        while True:
            began = time.time() - self._origin
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._begun += began
            self._steps += 1
            yield batch

    def gradients_are(self, tensors: Sequence[Any]) -> None:
        """In a graph: this rank's gradients are these."""
        self._note(tensors, 0)

    def sums_are(self, tensors: Sequence[Any]) -> None:
        """In a graph: the sums over the ranks are these."""
        self._note(tensors, 2)

    def _note(self, tensors: Sequence[Any], place: int) -> None:
        with tf.device("/CPU:0"), tf.control_dependencies([t for t in tensors if t is not None]):
            now = tf.numpy_function(_now, [], tf.float64) if self._deterministic else tf.timestamp()
            # Adds the seconds since `_origin`, and 1, in as few operations as it takes.
            seconds, ones = np.eye(4)[place : place + 2]
            self._sums.assign_add(now * seconds + (ones - self._origin * seconds))

    def is_waiting(self) -> bool:
        """Whether this rank's gradients are ready, and their sums are not."""
        _, gradients, _, sums = self._sums.numpy()
        return bool(gradients > sums)

    def take(self) -> Times:
        """The times since the last call; between two steps."""
        gradients, _, sums, steps = self._sums.numpy()
        found = Times(int(steps), gradients - self._begun, sums - gradients)
        last, self._taken = self._taken, found
        return Times(found.steps - last.steps, found.compute - last.compute, found.wait - last.wait)
