"""What the loop changes in the course of a run: step, losses, clock, and the flags that ranks send each other."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from hvd_cifar.data import sampler
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.errors import DIVERGED, Diverged
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.training.step_times import StepTimes

SECONDS_BETWEEN_LOOKS = 1.0  # between fetches of the steps' results; a request to stop waits as long


class StepClock:
    """Seconds of training steps, without evaluation and saving."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._resumed = time.perf_counter()
        self._pauses = 0
        self._lapped = 0.0

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return self._seconds + (0.0 if self._pauses else time.perf_counter() - self._resumed)

    def lap(self) -> float:
        """Return the seconds since the last lap, and begin the next one."""
        before, self._lapped = self._lapped, self.seconds
        return self._lapped - before

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time of the block. Blocks may be nested."""
        if not self._pauses:
            self._seconds += time.perf_counter() - self._resumed
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._resumed = time.perf_counter()


class Losses(NamedTuple):
    """Losses of a global batch: mean cross-entropy, the penalties (weight decay, losses of layers), and their sum."""

    cross_entropy: float
    weight_loss: float
    total_loss: float


class ControlFlags:
    """Numbers that ranks send each other with a step's loss, by name. All ranks get the sums.

    Attributes:
        own: this rank's, sent with each step until they change.
        sums: over all ranks, of the steps whose results were fetched; 0 until then.
    """

    def __init__(self) -> None:
        self.own: dict[str, float] = {}
        self.sums: dict[str, float] = {}

    def declare(self, name: str) -> None:
        """Add a flag, on every rank, before the step is built."""
        self.own[name] = self.sums[name] = 0.0

    def add(self, sums: Sequence[float]) -> None:
        """Add a step's sums."""
        for name, value in zip(self.own, sums, strict=True):
            self.sums[name] += value


class Progress:
    """Step, losses and clock of a run; the same on every rank, except for clock and flags of its own.

    Attributes:
        step: finished global steps; `first_step`: those of earlier processes.
        saved_step: of the newest checkpoint of this run; -1: none.
        saved_at: when it was saved, or the process began its steps; `time.monotonic`.
        rate_factor: multiplies the schedule's learning rate; a callback may change it.
        skipped: losses of steps whose changes were undone, by step, of this process.
        stop_requested: by any rank: the run saves this step and stops.
        ends_early: why this step is the last one; the same on all ranks.
        fetches_each_step: whether each step's results are fetched before the next step.
        on_bad_loss: asks the callbacks whether the run goes on after a step's loss that is not finite.
        spans: from `aside`: kind, step, begin and end in Unix time.
    """

    def __init__(self, first_step: int = 0, saved_step: int = -1, watch: Watch | None = None) -> None:
        """`watch`: the rank's watchdog, which is told of phases; None: one that does not act."""
        self.watch = watch or Watch(0)
        self.times = StepTimes()
        self.clock = StepClock()
        self.flags = ControlFlags()
        for name in ("stop", "save", "seconds"):
            self.flags.declare(name)
        self.begin(first_step, saved_step)
        self.rate_factor = 1.0
        self.skipped: dict[int, float] = {}
        self.spans: list[tuple[str, int, float, float]] = []
        self.rates: list[tuple[int, float]] = []  # first step of each log line, and its images/s
        self.stop_requested = False
        self.ends_early = ""
        self.fetches_each_step = False
        self.on_bad_loss: Callable[[int, float], bool] = lambda step, loss: False
        self._seconds_per_step = SECONDS_BETWEEN_LOOKS  # of this rank, evaluation and saving included
        self._looked = time.perf_counter()

    def begin(self, first_step: int, saved_step: int) -> None:
        """Begin at a step, of which there is a checkpoint in this run, or `saved_step` is -1."""
        self.first_step = self.step = first_step
        self.saved_step = saved_step
        self.saved_at = time.monotonic()
        self._forget()

    def go_back(self, step: int) -> None:
        """Continue from the checkpoint of an earlier step."""
        self.step = self.saved_step = step
        self.ends_early = ""
        self._forget()

    def _forget(self) -> None:
        self.losses: Losses | None = None  # of the last step whose result was fetched
        self.micro_batches: Sequence[MicroBatch] = ()  # of the last step
        self._unseen: list[Any] = []  # results of steps, left on the device until `check_losses`
        self._next_look = self.step + 1

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
        self.saved_step, self.saved_at, self.flags.sums["save"] = self.step, time.monotonic(), 0.0

    def save_is_due(self, minutes: float) -> bool:
        """Whether the newest checkpoint is older than `minutes`; 0: never. Rank 0's clock decides for all ranks."""
        return 0 < minutes * 60 < time.monotonic() - self.saved_at

    def flags_to_send(self, stop: bool, save: bool, is_root: bool) -> list[float]:
        """This rank's flags for the next step, in their order. Rank 0's seconds tell all when to fetch results."""
        seconds = self._seconds_per_step if is_root else 0.0
        self.flags.own |= {"stop": float(stop), "save": float(save), "seconds": seconds}
        return list(self.flags.own.values())

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

        Raises:
            Diverged: at the first loss that is not finite, unless a callback deals with it.
        """
        unseen, self._unseen = self._unseen, []
        first = self.step - len(unseen) + 1
        for step, result in enumerate(unseen, start=first):
            loss, penalty, *sums = map(float, result.numpy())
            self.flags.sums["seconds"] = 0.0  # of the newest step alone
            self.flags.add(sums)
            if math.isfinite(loss):
                self.losses = Losses(loss - penalty, penalty, loss)
            elif not self.on_bad_loss(step, loss):
                raise self.diverged(f"loss = {loss} at step {step}", step - 1)
            self.stop_requested |= self.flags.sums["stop"] > 0
            self._next_look = self.step + max(1, int(SECONDS_BETWEEN_LOOKS / max(self.flags.sums["seconds"], 1e-6)))
        if unseen:
            now = time.perf_counter()
            self._seconds_per_step, self._looked = (now - self._looked) / len(unseen), now

    def diverged(self, how: str, weights_step: int | None) -> Diverged:
        """The error for a loss that is not finite. `how` names the loss; `weights_step` is the step of its weights."""
        kept = self.kept
        if weights_step is not None and weights_step == self.saved_step:
            kept += ", but its weights give this loss: go on from an earlier one"
        return Diverged(f"{DIVERGED} with {how}; {kept}; lower --learning-rate or give --clip-norm", weights_step)

    @contextlib.contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Exclude the time of the block from the clock, and add it to `spans`. `kind`: one of `sessions.SPANS`."""
        step, began = self.step, time.time()
        with self.clock.paused(), self.watch.phase(kind):
            try:
                yield
            finally:
                self.spans.append((kind, step, began, time.time()))

    @property
    def kept(self) -> str:
        """Which checkpoint a run that ends now can resume from, in words."""
        return f"the checkpoint of step {self.saved_step} is kept" if self.saved_step >= 0 else "nothing was saved"
