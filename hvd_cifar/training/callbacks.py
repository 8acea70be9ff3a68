"""What a callback sees of a run and may do to it: `Callback`, `StepObserver`, `Run`.

The program's own extensions (`hvd_cifar.extensions`) use nothing else, so a callback of yours can do what they do.
This module imports no TensorFlow: the command line lists the extensions' options before it starts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from hvd_cifar.errors import TrainingError, UserError, reason_of

if TYPE_CHECKING:
    import keras

    from hvd_cifar.config import TrainSettings
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.models import Net
    from hvd_cifar.models.recipe import Recipe
    from hvd_cifar.optim.schedules import Schedule
    from hvd_cifar.reporting.metrics import Reporter
    from hvd_cifar.runtime.world import World
    from hvd_cifar.training.checkpoint import Checkpoints
    from hvd_cifar.training.evaluate import Evaluation
    from hvd_cifar.training.plan import Plan
    from hvd_cifar.training.progress import Progress
    from hvd_cifar.training.state import TrainState
    from hvd_cifar.training.work import Work

S = TypeVar("S")
PACKAGE = f"{__name__.partition('.')[0]}."


class StepObserver:
    """Watches the training step. Methods are called in the step's graph, while it is traced.

    Add an observer with `Run.observe` in `Callback.on_build`.
    """

    def on_gradients(self, gradients: Sequence[Any]) -> None:
        """This rank's gradients, before the all-reduce; under mixed_float16 times the loss scale."""

    def on_reduced(self, gradients: Sequence[Any]) -> None:
        """The summed gradients after the all-reduce, before --clip-norm, in the order of trainable variables."""

    def on_sums(self, tensors: Sequence[Any]) -> None:
        """What the all-reduce has summed besides the gradients, after the update."""

    def after_update(self) -> None:
        """After the weights' update."""


class Callback:
    """Called at events of a run; each method does nothing until a subclass replaces it.

    Every rank calls every method at the same steps, so a method may run collectives (`Run.ranks`), if it does so on
    every rank. An error on one rank ends the run on all ranks.
    """

    def on_build(self, run: Run) -> None:
        """Once net and optimizer exist, before a checkpoint is restored.

        Here a callback adds its variables to `run.state`, its observers of the step (`Run.observe`) and numbers that
        ranks send each other (`run.progress.own_flags`), and raises `UserError`, the same on every rank, where its
        settings do not fit the run.
        """

    def on_restore(self, run: Run) -> str | None:
        """After all ranks have the state of the checkpoint, or the initial one.

        A callback that has a newer state sets `run.state` to it, on every rank, and returns a word for it.
        """

    def on_start(self, run: Run) -> None:
        """Before the first step, also in a resumed run."""

    def before_steps(self, run: Run) -> None:
        """After every callback's `on_start`: what an earlier process has put off is due."""

    def on_step(self, run: Run) -> None:
        """After each global step. Its loss may still be on the device: `run.loss` may be that of an earlier step."""

    def on_log(self, run: Run) -> None:
        """After each log line; `run.loss` and `run.learning_rate` are those of the last step."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """After each evaluation; `evaluation.step` is that of its weights."""

    def before_checkpoint(self, run: Run) -> None:
        """Before a checkpoint is written; every rank already has the state that will be saved."""

    def before_save(self, run: Run) -> None:
        """Before the state is saved or copied: a callback stores its counters in its variables."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint has been written to `path`, on rank 0's host."""

    def on_end(self, run: Run) -> None:
        """After the last step. For a user's callbacks the last evaluation is done and `run.summary` is complete."""

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        """Before summary.json is written: add entries to `summary`. Those of rank 0 count."""


@dataclass(eq=False)
class Run:
    """A run, as callbacks see it on every rank. Attributes are read-only, except where their text says otherwise.

    Attributes:
        work, net: what the run trains, and what the model is made of.
        state: all variables of the run; callbacks add theirs.
        world: this rank and the others: rank, size, host, device.
        ranks: the module `hvd_cifar.distributed.collectives`. Its `all_gather_object(value)` and
            `broadcast_object(value)` take any object that can be pickled. `on_root(function)` calls a function on rank
            0 and gives its result to all ranks; `on_every_rank(function)` raises on all ranks the error of one;
            `barrier()` waits for all. Every rank calls them, in the same order.
        schedule: learning rate by step.
        progress: step, losses and clock.
        run_dir: folder of the run's files, on rank 0's host.
        reporter: what writes these files; `show(step, {tag: number})` adds numbers to TensorBoard's.
        checkpoints: those of the run, on rank 0.
        callbacks: those of this program and the user's, in the order in which they are called.
        observers: of the step.
        is_evaluated_here: whether these ranks evaluate during training; a callback may set it to False in `on_build`.
        evaluation: the newest `Evaluation`; None before the first.
        summary: what summary.json holds; empty before the end.
    """

    work: Work
    net: Net
    state: TrainState
    world: World
    ranks: Any
    schedule: Schedule
    progress: Progress
    run_dir: Path
    reporter: Reporter
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback] = ()
    observers: list[StepObserver] = field(default_factory=list)
    is_evaluated_here: bool = True
    evaluation: Any = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> TrainSettings:
        """Every option, with values where the user gave none."""
        return self.work.settings

    @property
    def plan(self) -> Plan:
        """The batch arithmetic."""
        return self.work.plan

    @property
    def recipe(self) -> Recipe:
        """The model's, with the changes of --set."""
        return self.work.recipe

    @property
    def data(self) -> Dataset:
        """The data set."""
        return self.work.dataset

    @property
    def dataset(self) -> str:
        """The name of the data set."""
        return self.data.name

    @property
    def watched(self) -> str:
        """The part of the data set that is evaluated during training, "test" or "validation"."""
        return "validation" if self.data.validation else "test"

    @property
    def model(self) -> keras.Model:
        """The Keras model that is trained."""
        return self.net.model

    @property
    def optimizer(self) -> Any:
        """Distributed, and built for the model's variables."""
        return self.state.optimizer

    @property
    def step(self) -> int:
        """Finished global steps."""
        return self.progress.step

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
        return self.schedule(max(0, self.step - 1))

    @property
    def loss(self) -> float | None:
        """Loss of the newest step whose result was fetched, over its global batch; None before the first."""
        return self.progress.loss

    @property
    def evaluation_is_due(self) -> bool:
        """Whether --eval-every asks for an evaluation of this step. False at the last step: the end evaluates it."""
        return 0 < self.step < self.total_steps and self.is_due(self.plan.evaluation_steps)

    def is_due(self, every: int) -> bool:
        """Whether the last step is a multiple of `every`; 0: never."""
        return every > 0 and self.step % every == 0

    def say(self, line: str) -> None:
        """Print a line, on rank 0."""
        self.reporter.say(line)

    def warn(self, line: str, step: int | None = None) -> None:
        """Print a line to standard error, on rank 0; with `step` also record it."""
        self.reporter.warn(line, step)

    @contextmanager
    def files_may_fail(self, what: str) -> Iterator[None]:
        """A block whose files training does not depend on: an `OSError` in it is a warning, `what` and its reason."""
        try:
            yield
        except OSError as failure:
            self.warn(f"{what}: {reason_of(failure)}")

    def record(self, event: str, **values: Any) -> None:
        """Add a line to metrics.jsonl, on rank 0. `values` are JSON; give the step as step=run.step."""
        self.reporter.record(event, **values)

    def observe(self, observer: StepObserver) -> None:
        """Add an observer of the step. Observers are called in the order in which they are added."""
        self.observers.append(observer)

    @contextmanager
    def aside(self, kind: str) -> Iterator[None]:
        """A block whose time does not count as training; `kind` names it in the summary (`sessions.SPANS`)."""
        step, began = self.step, time.time()
        with self.progress.clock.paused(), self.progress.watch.phase(kind):
            try:
                yield
            finally:
                self.reporter.mark(kind, began=began, step=step)

    def options(self, kind: type[S]) -> S:
        """The settings, as those of an extension: they have its options."""
        return cast(S, self.settings)

    def save(self) -> None:
        """Write a checkpoint of this step, unless there is one. A collective. UserError where it cannot be written."""
        self.progress.check_losses()
        with self.aside("checkpoints"):
            self.state.average(self.step)
            self.tell("before_checkpoint")
            if self.progress.saved_step != self.step:
                self.tell("before_save")
                path = self.ranks.on_root(self._save)
                self.progress.saved()
                self.say(f"step {self.step}: saved {path}")
                self.tell("on_checkpoint", path)

    def _save(self) -> Path:
        """Rank 0's part."""
        assert self.checkpoints is not None, "this is rank 0"
        path = self.checkpoints.save()
        try:
            self.reporter.catch_up()
        except UserError as failure:
            raise UserError(f"{failure}; the checkpoint {path.name} is kept") from None
        return path

    def end_after_this_step(self, why: str) -> None:
        """End the run as if this step were the last one. Every rank has to call it at the same step."""
        self.progress.ends_early = why

    def tell(self, event: str, *values: Any) -> list[Any]:
        """Call the method `event` of every callback, in order; their results."""
        found = []
        for callback in self.callbacks:
            with self.progress.watch.phase(f"{type(callback).__name__}.{event}"):
                try:
                    found.append(getattr(callback, event)(self, *values))
                except (UserError, TrainingError) as error:
                    # This package's callbacks raise them on all ranks, but may pass on those of a user's.
                    error.of_one_rank |= not type(callback).__module__.startswith(PACKAGE)
                    raise
        return found
