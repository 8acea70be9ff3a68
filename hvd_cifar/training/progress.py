"""The state of a run that the loop changes (`Progress`), and what callbacks see of it (`Run`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import keras

from hvd_cifar.config import TrainSettings
from hvd_cifar.data import sampler
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.errors import DIVERGED, Diverged
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World
from hvd_cifar.training.plan import Plan


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


LOSS_DECAY = 0.9  # per step, of the losses' moving averages, as in TensorFlow's CIFAR-10 tutorial
SECONDS_BETWEEN_LOOKS = 1.0  # between fetches of the steps' results; a request to stop waits as long
# A damaged image or a flipped bit spoils a step or two. If this many steps in a row are skipped, the weights or the
# learning rate are at fault, and more steps would only use up the data.
MOST_SKIPS_IN_A_ROW = 10


class Losses(NamedTuple):
    """Losses of a global batch: mean cross-entropy, the penalties (weight decay, losses of layers), and their sum."""

    cross_entropy: float
    weight_loss: float
    total_loss: float


class Progress:
    """Step, losses and clock of a run; the same on every rank, except for clock and `seconds_per_step`."""

    def __init__(
        self,
        first_step: int,
        saved_step: int,
        watch: Watch | None = None,
        stops: bool = False,
        skips: bool = False,
        at_once: bool = False,
    ) -> None:
        """Begin at a step.

        Args:
            first_step: finished global steps.
            saved_step: of the newest checkpoint of this run; -1: none.
            watch: the rank's watchdog, which is told of phases; None: one that does not act.
            stops: whether the run stops before its next step.
            skips: whether a step whose loss is not finite changes nothing (`StepSpec.skips`).
            at_once: fetch each step's results before the next step, for the count of skips in the copied state.
        """
        self.watch = watch or Watch(0)
        self.first_step = self.step = first_step
        self.saved_step = saved_step
        self.rate_factor = 1.0  # multiplies the schedule's learning rate, after rollbacks
        self.rollbacks = 0
        self.skipped_before = 0  # number of skipped steps in earlier processes
        self.skipped: dict[int, float] = {}  # losses of skipped steps of this process, by step
        self.spans: list[tuple[str, int, float, float]] = []  # from `aside`: kind, step, begin and end in Unix time
        self._skips = skips
        self._at_once = at_once
        self._skips_in_a_row = 0
        self.losses: Losses | None = None  # of the last step whose result was fetched
        self.average_losses: Losses | None = None  # over the steps of this process
        self.clock = StepClock()
        self.stop_requested = stops  # by any rank: the run saves this step and stops
        self.save_requested = False  # by rank 0, which could not write a file: a checkpoint tries again or ends the run
        self.seconds_per_step = SECONDS_BETWEEN_LOOKS  # of this rank, evaluation and saving included
        self.micro_batches: Sequence[MicroBatch] = ()  # of the last step
        self.has_news = False  # on rank 0: validation ranks have answered
        self.news = False  # the same, once all ranks know
        self.ends_early = ""  # why this step is the last one; the same on all ranks
        self._unseen: list[Any] = []  # results of steps, left on the device until `check_losses`
        self._looked = time.perf_counter()
        self._next_look = first_step + 1

    @property
    def loss(self) -> float | None:
        """Loss of the last step whose result was fetched."""
        return self.losses.total_loss if self.losses else None

    def add(self, micro_batches: Sequence[MicroBatch], result: Any) -> None:
        """Count a step: its micro-batches, and float [6] as the function of `make_train_step` returns it.

        Fetching results waits for the device, so it happens once a second. It may raise as `check_losses` does.
        """
        self.step += 1
        self.micro_batches = micro_batches
        self._unseen.append(result)
        if self._at_once or self.step >= self._next_look:
            self.check_losses()

    def check_losses(self) -> None:
        """Fetch the results of all steps since the last call. They are the same on all ranks.

        Raises:
            Diverged: at the first loss that is not finite, or where too many steps in a row were skipped.
        """
        first = self.step - len(self._unseen) + 1
        for step, result in enumerate(self._unseen, start=first):
            loss, penalty, stops, saves, seconds, news = map(float, result.numpy())
            if math.isfinite(loss):
                self._note(Losses(loss - penalty, penalty, loss))
            else:
                self._not_finite(step, loss)
            self.stop_requested |= bool(stops > 0)
            self.save_requested |= bool(saves > 0)
            self.news |= bool(news > 0)
            self._next_look = self.step + max(1, int(SECONDS_BETWEEN_LOOKS / max(seconds, 1e-6)))
        if self._unseen:
            now = time.perf_counter()
            self.seconds_per_step, self._looked = (now - self._looked) / len(self._unseen), now
        self._unseen.clear()

    def _note(self, found: Losses) -> None:
        pairs = zip(self.average_losses or found, found, strict=True)
        self.losses, self._skips_in_a_row = found, 0
        self.average_losses = Losses(*(LOSS_DECAY * average + (1 - LOSS_DECAY) * value for average, value in pairs))

    def _not_finite(self, step: int, loss: float) -> None:
        how = f"loss = {loss} at step {step}"
        if not self._skips:
            raise self.diverged(how, step - 1)
        self.skipped[step] = loss
        self._skips_in_a_row += 1
        if self._skips_in_a_row == MOST_SKIPS_IN_A_ROW:
            raise self.diverged(f"{how}, and {MOST_SKIPS_IN_A_ROW} steps in a row were skipped", None)

    def diverged(self, how: str, weights_step: int | None) -> Diverged:
        """The error for a loss that is not finite. `how` names the loss; `weights_step` is the step of its weights."""
        kept = self.kept
        if weights_step is not None and weights_step == self.saved_step:
            kept += ", but its weights give this loss: go on from an earlier one"
        return Diverged(f"{DIVERGED} with {how}; {kept}; lower --learning-rate or give --clip-norm", weights_step)

    def go_back(self, step: int, rate_factor: float) -> None:
        """Continue from the checkpoint of an earlier step, and multiply the learning rate by a factor."""
        self.step = self.saved_step = step
        self.rate_factor *= rate_factor
        self.rollbacks += 1
        self.losses, self.average_losses, self.micro_batches = None, None, ()
        self.news = self.has_news = False
        self._unseen.clear()
        self._next_look = step + 1

    @contextlib.contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """Exclude the time of the block from the clock, and add it to `spans`. `kind`: one of `goodput.SPANS`."""
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


@dataclass(frozen=True)
class Run:
    """What callbacks see of a run, on every rank; read-only.

    Attributes:
        settings: every option, with values where the user gave none.
        recipe: the model's, with the changes of --set.
        world: this rank and the others: rank, size, host, device.
        plan: the batch arithmetic.
        schedule: learning rate by step.
        model: the Keras model that is trained.
        dataset: name of the data set.
        run_dir: folder of the run's files.
    """

    settings: TrainSettings
    world: World
    plan: Plan
    recipe: Recipe
    schedule: Schedule
    model: keras.Model
    dataset: str
    run_dir: Path
    _progress: Progress
    _results: dict[str, Any] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Finished global steps."""
        return self._progress.step

    @property
    def total_steps(self) -> int:
        """Global steps at which the run ends."""
        return self.plan.total_steps

    @property
    def epoch(self) -> float:
        """Epochs done, counted in steps."""
        return self.step / self.plan.steps_per_epoch

    @property
    def learning_rate(self) -> float:
        """Learning rate of the last step."""
        return self.schedule(max(0, self.step - 1)) * self._progress.rate_factor

    @property
    def loss(self) -> float | None:
        """Loss of the last step that was logged, over its global batch; None before the first."""
        return self._progress.loss

    @property
    def examples(self) -> list[int]:
        """Indices, in the data set's training part, of the examples that this rank used in the last step."""
        used = (int(i) for batch in self._progress.micro_batches for i in batch.example.numpy())
        return [i for i in used if i != sampler.PADDING]

    @property
    def evaluation(self) -> Any:
        """The newest `Evaluation`; None before the first."""
        return self._results.get("evaluation")

    @property
    def summary(self) -> Mapping[str, Any]:
        """What summary.json holds; empty before the end."""
        return self._results.get("summary", {})

    @property
    def evaluation_is_due(self) -> bool:
        """Whether --eval-every asks for an evaluation of this step. False at the last step: the end evaluates it."""
        return 0 < self.step < self.total_steps and self.is_due(self.plan.evaluation_steps)

    def is_due(self, every: int) -> bool:
        """Whether the last step is a multiple of `every`; 0: never."""
        return every > 0 and self.step % every == 0
