"""Each rank's computation and waiting times, measured inside the step's graph."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # no public name tells it

from hvd_cifar.training.callbacks import StepObserver

T = TypeVar("T")


class Times(NamedTuple):
    """Seconds of some steps of a rank.

    compute: from the request for the batch to this rank's last gradient.
    wait: from there to the sums over all ranks, for slower ranks and for the network; on unlike ranks also for rank 0's
        weights.
    """

    steps: int
    compute: float
    wait: float


def clock() -> Any:
    """An operation that reads the clock: Unix time in seconds, a float64 scalar.

    In deterministic mode TensorFlow's own operation refuses to, so Python reads it.
    """
    if not is_op_determinism_enabled():
        return tf.timestamp()
    return tf.ensure_shape(tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64), [])


class StepTimes(StepObserver):
    """Measures when a step's gradients and their sums are ready.

    It adds two clock readings and two additions to the graph, on the CPU; no other operation waits for them. On a GPU
    the readings tell when work is queued, not when it is done.
    """

    def __init__(self) -> None:
        self._origin = time.time()
        with tf.device("/CPU:0"):
            # For gradients, their sums, the update and rank 0's: the sum of times since `_origin`, the number of steps.
            self._sums = tf.Variable([0.0] * 8, dtype=tf.float64, trainable=False, name="step_times")
        self._begun = 0.0
        self._taken = Times(0, 0.0, 0.0)

    def each(self, batches: Iterable[T]) -> Iterator[T]:
        """Pass batches on. A step begins when its batch is requested."""
        iterator = iter(batches)
        while True:
            began = time.time() - self._origin
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._begun += began
            yield batch

    def on_gradients(self, gradients: Sequence[Any]) -> None:
        """Note when this rank's gradients are ready."""
        self._note(gradients, 0)

    def on_sums(self, tensors: Sequence[Any]) -> None:
        """Note when the sums over the ranks are ready."""
        self._note(tensors, 2)

    def update_is(self, tensors: Sequence[Any]) -> None:
        """To be called in a graph, with what this rank has updated and is to take from rank 0."""
        self._note(tensors, 4)

    def root_is(self, tensors: Sequence[Any]) -> None:
        """To be called in a graph, with what came from rank 0."""
        self._note(tensors, 6)

    def _note(self, tensors: Sequence[Any], place: int) -> None:
        with tf.device("/CPU:0"), tf.control_dependencies([t for t in tensors if t is not None]):
            now = clock()
            # Adds the seconds since `_origin`, and 1 to the count, in one assignment.
            seconds, ones = np.eye(8)[place : place + 2]
            self._sums.assign_add(now * seconds + (ones - self._origin * seconds))

    def is_waiting(self) -> bool:
        """Whether this rank's gradients are ready and their sums are not, or its update is and rank 0's is not."""
        gradients, sums, updates, roots = self._sums.numpy()[1::2]
        return bool(gradients > sums or updates > roots)

    def take(self) -> Times:
        """The times since the last call. To be called between two steps."""
        gradients, _, sums, steps, updates, _, roots, _ = self._sums.numpy()
        found = Times(int(steps), gradients - self._begun, sums - gradients + roots - updates)
        last, self._taken = self._taken, found
        # Negative where the clock was set back. Not 0: shares are taken of the sum.
        compute, wait = max(1e-9, found.compute - last.compute), max(0.0, found.wait - last.wait)
        return Times(found.steps - last.steps, compute, wait)
