"""What the loop changes in the course of a run: step, losses, clocks, and the flags that ranks send each other."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled  # no public name tells it

from hvd_cifar.data import sampler
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.errors import DIVERGED, TrainingError
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.training.callbacks import StepObserver

SECONDS_BETWEEN_LOOKS = 1.0  # between fetches of the steps' results; a request to stop waits as long


class StepClock:
    """Seconds of training steps, without evaluation and saving."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._resumed = time.perf_counter()
        self._pauses = 0

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return self._seconds + (0.0 if self._pauses else time.perf_counter() - self._resumed)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block. Blocks may be nested."""
        self._seconds = self.seconds
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._resumed = time.perf_counter()


class WaitClock(StepObserver):
    """Seconds for which this rank waits for others, measured inside the step's graph.

    It adds two clock readings and two additions to the graph, on the CPU; no other operation waits for them. On a GPU
    the readings tell when work is queued, not when it is done.
    """

    def __init__(self) -> None:
        self._origin, self._taken = time.time(), 0.0
        with tf.device("/CPU:0"):
            # For what this rank has computed, and for what has come: the sum of times since `_origin`, their number.
            self._sums = tf.Variable([0.0] * 4, dtype=tf.float64, trainable=False, name="step_times")

    def on_gradients(self, gradients: Sequence[Any]) -> None:
        """A wait begins once this rank has these, for slower ranks and for the network."""
        self._note(gradients, 0)

    def on_sums(self, tensors: Sequence[Any]) -> None:
        """It ends once these have come from other ranks."""
        self._note(tensors, 2)

    def _note(self, tensors: Sequence[Any], place: int) -> None:
        with tf.device("/CPU:0"), tf.control_dependencies([t for t in tensors if t is not None]):
            now = clock()
            # Adds the seconds since `_origin`, and 1 to the count, in one assignment.
            seconds, ones = np.eye(4)[place : place + 2]
            self._sums.assign_add(now * seconds + (ones - self._origin * seconds))

    def is_running(self) -> bool:
        """Whether this rank waits now."""
        _, begun, _, ended = self._sums.numpy()
        return bool(begun > ended)

    def take(self) -> float:
        """The seconds since the last call. To be called between two steps."""
        begun, _, ended, _ = self._sums.numpy()
        before, self._taken = self._taken, float(ended - begun)
        return max(0.0, self._taken - before)  # negative where the clock was set back


def clock() -> Any:
    """An operation that reads the clock: Unix time in seconds, a float64 scalar."""
    # In deterministic mode TensorFlow's own operation refuses to, so Python reads it.
    if not is_op_determinism_enabled():
        return tf.timestamp()
    return tf.ensure_shape(tf.numpy_function(lambda: np.float64(time.time()), [], tf.float64), [])


class Losses(NamedTuple):
    """Losses of a global batch."""

    cross_entropy: float  # the mean
    weight_loss: float  # the penalties: weight decay, losses of layers
    total_loss: float


class Progress:
    """Step, losses and clocks of a run; the same on every rank, except for clocks and flags of its own.

    Attributes:
        step: finished global steps; `first_step`: those of earlier processes.
        saved_step: of the newest checkpoint of this run; -1: none.
        ends_early: why this step is the last one; the same on all ranks.
        fetches_each_step: whether each step's results are fetched before the next step.
        own_flags: numbers that this rank sends the others with each step's loss, by name, until they change. A callback
            adds its own in `on_build`, on every rank.
        flags: their sums over all ranks, of the steps whose results were fetched.
    """

    def __init__(self, watch: Watch | None = None) -> None:
        """`watch`: the rank's watchdog, which is told of phases; None: one that does not act."""
        self.watch = watch or Watch(0)
        self.clock = StepClock()
        self.waits = WaitClock()
        self.own_flags = {"stop": 0.0, "save": 0.0, "seconds": 0.0}
        self.flags: dict[str, float] = defaultdict(float)
        self.losses: Losses | None = None  # of the last step whose result was fetched
        self.micro_batches: Sequence[MicroBatch] = ()  # of the last step
        self.ends_early = ""
        self.fetches_each_step = False
        self._unseen: list[Any] = []  # results of steps, left on the device until `check_losses`
        self._seconds_per_step = SECONDS_BETWEEN_LOOKS  # of this rank, evaluation and saving included
        self._looked = time.perf_counter()
        self.begin(0, -1)

    def begin(self, first_step: int, saved_step: int) -> None:
        """Begin at a step, of which there is a checkpoint in this run, or `saved_step` is -1."""
        self.step = self.first_step = first_step
        self.saved_step, self._saved_at = saved_step, time.monotonic()  # or the process begins its steps
        self._next_look = first_step + 1

    @property
    def stop_requested(self) -> bool:
        """Whether a rank has asked to stop: the run saves this step and stops."""
        return self.flags["stop"] > 0

    @property
    def loss(self) -> float | None:
        """Loss of the last step whose result was fetched."""
        return self.losses.total_loss if self.losses else None

    @property
    def examples(self) -> list[int]:
        """Indices of the training examples that this rank used in the last step."""
        used = (int(i) for batch in self.micro_batches for i in batch.example.numpy())
        return [i for i in used if i != sampler.PADDING]

    def saved(self) -> None:
        """Note that a checkpoint of this step is written."""
        self.saved_step, self._saved_at, self.flags["save"] = self.step, time.monotonic(), 0.0

    def save_is_due(self, minutes: float) -> bool:
        """Whether the newest checkpoint is older than `minutes`; 0: never. Rank 0's clock decides for all ranks."""
        return 0 < minutes * 60 < time.monotonic() - self._saved_at

    def flags_to_send(self, stop: bool, save: bool, is_root: bool) -> list[float]:
        """This rank's flags for the next step, in their order. Rank 0's seconds tell all when to fetch results."""
        seconds = self._seconds_per_step if is_root else 0.0
        self.own_flags |= {"stop": float(stop), "save": float(save), "seconds": seconds}
        return list(self.own_flags.values())

    def add(self, micro_batches: Sequence[MicroBatch], result: Any) -> None:
        """Count a step: its micro-batches, and what the function of `make_train_step` returned.

        Fetching results waits for the device, so it happens once a second. It may raise as `check_losses` does.
        """
        self.step += 1
        self.micro_batches = micro_batches
        self._unseen.append(result)
        if self.fetches_each_step or self.step >= self._next_look:
            self.check_losses()

    def check_losses(self) -> None:
        """Fetch the results of all steps since the last call. They are the same on all ranks.

        TrainingError at the first loss that is not finite.
        """
        unseen, self._unseen = self._unseen, []
        for step, result in enumerate(unseen, start=self.step - len(unseen) + 1):
            loss, penalty, *flags = map(float, result.numpy())
            self.flags["seconds"] = 0.0  # of the newest step alone
            for name, value in zip(self.own_flags, flags, strict=True):
                self.flags[name] += value
            if not math.isfinite(loss):
                raise self.diverged(f"loss = {loss} at step {step}", step - 1)
            self.losses = Losses(loss - penalty, penalty, loss)
            self._next_look = self.step + max(1, int(SECONDS_BETWEEN_LOOKS / max(self.flags["seconds"], 1e-6)))
        if unseen:
            now = time.perf_counter()
            self._seconds_per_step, self._looked = (now - self._looked) / len(unseen), now

    def diverged(self, how: str, weights_step: int) -> TrainingError:
        """The error for a loss that is not finite. `how` names the loss; `weights_step` is the step of its weights."""
        kept = self.kept
        if weights_step == self.saved_step:
            kept += ", but its weights give this loss: go on from an earlier one"
        return TrainingError(f"{DIVERGED} with {how}; {kept}; lower --learning-rate or give --clip-norm")

    @property
    def kept(self) -> str:
        """Which checkpoint a run that ends now can resume from, in words."""
        return f"the checkpoint of step {self.saved_step} is kept" if self.saved_step >= 0 else "nothing was saved"
