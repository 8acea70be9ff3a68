"""One rank's part of a run: what it is made of, and each thing that the loop does, by name."""

from __future__ import annotations

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_cifar.config import TrainSettings
from hvd_cifar.data import sampler
from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.replicas import find_divergence
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.models import Net
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.world import World, versions
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.evaluate import Evaluation
from hvd_cifar.training.image_sizes import ImageSizes
from hvd_cifar.training.recipe import RECIPES, Plan
from hvd_cifar.training.step import moving_statistics

STEPS_LEFT_OUT = 10  # steps whose speed does not count: tracing and cold caches


@dataclass
class _Window:
    """The steps since the last log line."""

    steps: int = 0
    examples: int = 0
    seconds: float = 0.0


@dataclass
class Run:
    """See the module. The loop uses it as a context, so that the terminal and the files are left in order."""

    settings: TrainSettings
    world: World
    plan: Plan
    data: str
    example_count: int
    net: Net
    optimizer: Any
    averages: MovingAverage | None
    state: State
    schedule: Schedule
    image_sizes: ImageSizes
    train_steps: dict[int, Any]  # by image size
    evaluator: Any
    batches: Iterator[list[Any]]
    run_dir: Path
    checkpoints: Checkpoints | None
    reporter: Reporter

    step_count: int = 0
    saved_step: int = -1  # of the newest checkpoint of this run; -1: none
    checkpoint_was_requested: bool = False
    _first_step: int = 0
    _request: bool = False
    _window: _Window = field(default_factory=_Window)
    _unseen: list[Any] = field(default_factory=list)  # results of steps, not yet fetched from the device
    _rates: list[tuple[int, float]] = field(default_factory=list)
    _used: list[tuple[int, list[int]]] = field(default_factory=list)  # examples by step, not yet written
    _averaged_step: int = -1  # at which moving statistics were last averaged
    _checked_step: int = -1  # at which the ranks were last found in sync
    _loss: float | None = None
    _evaluated: tuple[int, Evaluation] | None = None
    _progress: Any = None
    _began: float = 0.0
    _seconds_before: float = 0.0
    _resumed: float = 0.0

    @property
    def epoch(self) -> float:
        """Epochs done, counted in steps."""
        return self.step_count / self.plan.steps_per_epoch

    def __enter__(self) -> Run:
        """Start the clock, the bar and the listener for requests."""
        self._first_step = self.step_count
        self._averaged_step = self.saved_step  # what a checkpoint holds has been averaged
        self._seconds_before = float(self.state.seconds.numpy())
        if self.step_count < self.plan.total_steps:
            self.reporter.withdraw_summary()
        self.reporter.open(self.step_count, self.settings.record_examples)
        self._progress = self.reporter.progress(self.step_count, self.plan.total_steps)
        self._progress.__enter__()
        signal.signal(signal.SIGUSR1, self._on_request)
        self._began = self._resumed = time.perf_counter()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Leave the terminal and the files in order, also after an error, which then is the one to tell of."""
        self._progress.__exit__(None, None, None)
        with contextlib.suppress(UserError) if failure[0] else contextlib.nullcontext():
            self.reporter.close()

    def _on_request(self, *_: Any) -> None:
        self._request = True

    def step(self, slices: list[tuple[Any, ...]]) -> None:
        """One global step on this rank's slices of its batch: image, label, weight and example of each."""
        count = sampler.examples_in_step(self.example_count, self.plan.global_batch_size, self.step_count)
        rate = self.schedule(self.step_count)
        result = self.train_steps[self.image_sizes(self.step_count)](
            [(image, label, weight) for image, label, weight, _ in slices],
            tf.constant(count),
            tf.constant(rate, self.real),
            tf.constant(float(self._request)),
        )
        self._unseen.append(result)
        self._window.steps += 1
        self._window.examples += count
        self.step_count += 1
        if self.settings.record_examples:
            used = [int(i) for *_, example in slices for i in example.numpy() if i != sampler.PADDING]
            self._used.append((self.step_count, used))

    @property
    def real(self) -> tf.DType:
        """The type of losses and learning rates."""
        return tf.float64 if self.settings.precision == "float64" else tf.float32

    def step_is_due(self, every: int) -> bool:
        """Whether a multiple of so many steps is done."""
        return self.step_count % every == 0

    def evaluation_is_due(self) -> bool:
        """Whether to evaluate now: by --eval-every, or at the end of each or the recipe's third epoch."""
        every = self.settings.eval_every
        if every == 0 or self.step_count == self.plan.total_steps:
            return False  # the last evaluation is part of the end
        of_recipe = RECIPES[self.settings.model].evaluation_epochs * self.plan.steps_per_epoch
        return self.step_is_due(of_recipe if every is None else every)

    def sync_check_is_due(self) -> bool:
        """Whether to compare the ranks now."""
        every = self.settings.check_sync_every
        return every > 0 and self.step_is_due(every)

    @property
    def statistics_are_local(self) -> bool:
        """Whether each rank gathers moving statistics of its own, which are averaged before they are used."""
        return not (self.settings.sync_batch_norm or self.settings.virtual_shards)

    def check_losses(self) -> None:
        """Look at every result since the last look; results are the same on all ranks, so all act alike.

        Raises:
            TrainingError: at the first loss that is not finite.
        """
        first = self.step_count - len(self._unseen) + 1
        for step, (loss, requests) in enumerate((r.numpy() for r in self._unseen), start=first):
            if not math.isfinite(loss):
                raise TrainingError(
                    f"model diverged with loss = {float(loss)} at step {step}; {self._kept()}; "
                    "lower --learning-rate or give --clip-norm"
                )
            self._loss = float(loss)
            if requests > 0:
                self.checkpoint_was_requested = True
                self._request = False
        self._unseen.clear()

    def log(self) -> None:
        """Report the steps since the last log line."""
        self.check_losses()
        seconds = self._window.seconds + time.perf_counter() - self._resumed
        rate = self._window.examples / seconds
        self._rates.append((self.step_count - self._window.steps, rate))
        assert self._loss is not None
        self.reporter.train(
            self.step_count,
            round(self.epoch, 4),
            self._loss,
            self.schedule(self.step_count - 1),
            round(rate, 2),
            seconds / self._window.steps,
        )
        self._window = _Window()
        self._write_examples()
        self._resumed = time.perf_counter()

    def _write_examples(self) -> None:
        if not self.settings.record_examples:
            return
        by_rank = collectives.all_gather_object(self._used)
        for i, (step, _) in enumerate(self._used):
            self.reporter.examples(step, [used[i][1] for used in by_rank])
        self._used.clear()

    def check_sync(self, everything: bool = False) -> None:
        """Compare the ranks' variables, bit for bit; see `replicas`.

        Args:
            everything: batch norm's moving statistics, too, where ranks have averaged their own.

        Raises:
            TrainingError: on every rank, where they differ, and the run is not to go on with rank 0's.
        """
        self.check_losses()
        self._pause()
        began = time.perf_counter()
        variables = self.state.replicated(statistics_too=everything or not self.statistics_are_local)
        found = find_divergence(variables)
        if found is not None and self.settings.on_divergence == "stop":
            raise TrainingError(
                f"ranks are out of sync after step {self.step_count}: {found}; {self._kept()}; "
                "--on-divergence rebroadcast would go on with rank 0's values"
            )
        if found is not None:
            collectives.broadcast_variables(variables)
            self.state.mended.assign_add(1)
            self.reporter.warn(
                f"RANKS WERE OUT OF SYNC after step {self.step_count}: {found}; all go on with rank 0's values"
            )
        self._checked_step = self.step_count
        self.state.check_seconds.assign_add(time.perf_counter() - began)
        self._go_on()

    def _kept(self) -> str:
        """What a run that ends here leaves to go on from, in words."""
        return f"the checkpoint of step {self.saved_step} is kept" if self.saved_step >= 0 else "nothing was saved"

    def _average_statistics(self) -> None:
        """Make batch norm's moving statistics the same on all ranks; once a step, since an average may round."""
        if self.statistics_are_local and self._averaged_step != self.step_count:
            collectives.average_variables(moving_statistics(self.net.model))
            self._averaged_step = self.step_count

    def _pause(self) -> None:
        """Keep the seconds of evaluation and saving out of the speed of the steps."""
        self._window.seconds += time.perf_counter() - self._resumed

    def _go_on(self) -> None:
        self._resumed = time.perf_counter()

    def evaluate(self, six_views: bool = False) -> Evaluation:
        """Evaluate on the test set, with averaged weights where the recipe keeps them."""
        self.check_losses()  # first: it waits for the device, which is part of the steps' time
        self._pause()
        self._average_statistics()
        if self.averages:
            self.averages.swap()
        found = self.evaluator(six_views)
        if self.averages:
            self.averages.swap()
        if not math.isfinite(found.loss):
            raise TrainingError(
                f"model diverged with test loss = {found.loss} at step {self.step_count}; {self._kept()}; "
                "lower --learning-rate or give --clip-norm"
            )
        self._evaluated = (self.step_count, found)
        self.reporter.evaluation(self.step_count, round(self.epoch, 4), found.accuracy, found.loss, found.examples)
        self._go_on()
        return found

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one; the ranks are compared first."""
        self._average_statistics()
        self.check_sync(everything=True)
        self._pause()
        if self.saved_step != self.step_count:
            self._write_examples()  # what a checkpoint has learnt from is on record
            self.state.step.assign(self.step_count)
            self.state.seconds.assign(self._seconds())
            path = collectives.on_root(lambda: self.checkpoints.save() if self.checkpoints else None)
            self.saved_step = self.step_count
            self.reporter.say(f"step {self.step_count}: saved {path}")
        self.checkpoint_was_requested = False
        self._go_on()

    def _seconds(self) -> float:
        """Seconds of training, set-up left out, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._began

    def finish(self) -> None:
        """Save and evaluate at the last step, compare the ranks, write the summary."""
        if (
            self.step_count == self._first_step
            and collectives.broadcast_object(self.reporter.summary_step()) == self.step_count
        ):
            self.reporter.say(f"nothing left to do after step {self.step_count}: see {self.run_dir / 'summary.json'}")
            return
        if self._window.steps:
            self.log()
        self.save()
        many = bool(self.settings.test_time_augmentation)
        known = self._evaluated[1] if self._evaluated and self._evaluated[0] == self.step_count else None
        evaluated = known if known is not None and known.views == (6 if many else 1) else self.evaluate(many)
        seconds = self._seconds()
        digests = collectives.all_gather_object(collectives.digest(self.net.model.variables))
        rates = [rate for start, rate in self._rates if start >= self._first_step + STEPS_LEFT_OUT]
        rates = rates or [rate for _, rate in self._rates]
        summary = {
            "dataset": self.data,
            "model": self.settings.model,
            "world_size": self.world.size,
            "global_batch_size": self.plan.global_batch_size,
            "steps": self.step_count,
            "epochs": round(self.epoch, 4),
            "seed": self.settings.seed,
            "precision": self.settings.precision,
            "train_loss": self.reporter.last_train.get("loss"),
            "test_accuracy": evaluated.accuracy,
            "test_loss": evaluated.loss,
            "test_views": evaluated.views,
            "test_accuracy_of_one_view": evaluated.plain_accuracy,
            "test_examples": evaluated.examples,
            "images_per_second": round(statistics.median(rates), 2)
            if rates
            else self.reporter.last_train.get("images_per_second"),
            "training_seconds": round(seconds, 3),
            "replicas_identical": self._checked_step == self.step_count and len(set(digests)) == 1,
            "divergences_mended": int(self.state.mended.numpy()),
            "sync_check_seconds": round(float(self.state.check_seconds.numpy()), 6),
            "weights_sha256": digests[0],
            "weights_sha256_by_rank": digests,
            "versions": versions(),
        }
        self.reporter.summary(summary)
        self.reporter.say(
            f"{self.data}, {self.settings.model}: test accuracy {evaluated.accuracy:.2%} after {self.step_count} steps "
            f"({self.epoch:.2f} epochs) in {seconds:.1f} s; {self.run_dir / 'summary.json'}"
        )
