"""Everything that a run does besides its steps, as callbacks that hold their own state.

The callbacks of `assemble._callbacks_of` are called first, in that order, and the user's after them.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.distributed.collectives import random_states
from hvd_cifar.distributed.replicas import Divergence, find_divergence
from hvd_cifar.errors import OUT_OF_SYNC, TrainingError, UserError
from hvd_cifar.reporting import goodput
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.world import versions
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.confusion import FILE, Confusion
from hvd_cifar.training.evaluate import Evaluation
from hvd_cifar.training.progress import Progress, Run

STEPS_LEFT_OUT = 10  # of the throughput: tracing and cold caches slow the first steps down

Tell = Callable[..., None]  # (event, *values): calls a method of every callback


class Callback:
    """Called at events of a run, on every rank alike; each method does nothing until a subclass replaces it.

    Every rank calls every method at the same steps. A method may run collectives, if it does so on every rank. An
    error on one rank ends its process, and with it the run on all ranks.
    """

    def on_start(self, run: Run) -> None:
        """Before the first step, also in a resumed run."""

    def _after_start(self, run: Run) -> None:
        """Before the first step, after every callback's `on_start`: an evaluation, a checkpoint or a profile is due."""

    def on_step(self, run: Run) -> None:
        """After each global step. Its loss may still be on the device; `run.loss` is that of the last log line."""

    def on_log(self, run: Run) -> None:
        """After each log line; `run.loss` and `run.learning_rate` are those of the last step."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """After each evaluation; `evaluation.step` is that of its weights."""

    def before_checkpoint(self, run: Run) -> None:
        """Before a checkpoint is written; every rank already has the state that will be saved."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint has been written to `path`, on rank 0's host."""

    def on_rollback(self, run: Run) -> None:
        """After the run has returned to a checkpoint (--on-nan rollback); `run.step` is the checkpoint's step."""

    def on_end(self, run: Run) -> None:
        """After the last step. For a user's callbacks the last evaluation is done and `run.summary` is complete."""


class ExampleLedger(Callback):
    """Records which examples each rank used in each step (--record-examples)."""

    def __init__(self, progress: Progress, reporter: Reporter, at_once: bool) -> None:
        """`at_once`: write each step before its state is copied, so that no copied step lacks its record."""
        self.progress = progress
        self.reporter = reporter
        self.at_once = at_once
        self.used: list[tuple[int, list[int]]] = []  # by step, not yet written

    def on_step(self, run: Run) -> None:
        """Note this rank's examples."""
        self.used.append((run.step, run.examples))
        if self.at_once:
            self.progress.check_losses()  # tells whether the step was skipped
            self.on_log(run)
            collectives.barrier()

    def on_log(self, run: Run) -> None:
        """Write the steps since the last log line."""
        by_rank = collectives.all_gather_object(self.used)
        for i, (step, _) in enumerate(self.used):
            self.reporter.examples(step, [used[i][1] for used in by_rank], step in self.progress.skipped)
        self.used.clear()

    def on_rollback(self, run: Run) -> None:
        """Forget the steps that the run makes again."""
        self.used.clear()

    def before_checkpoint(self, run: Run) -> None:
        """Write the steps up to the checkpoint."""
        self.on_log(run)


class Logger(Callback):
    """Writes a log line every --log-every steps, and checks all losses since the last one."""

    def __init__(self, progress: Progress, reporter: Reporter, tell: Tell) -> None:
        self.progress = progress
        self.reporter = reporter
        self.tell = tell
        self.logged_step = progress.step
        self.skips_told = 0
        self.examples = 0  # since the last line
        self.rates: list[tuple[int, float]] = []  # first step of a line, and its images/s

    def on_start(self, run: Run) -> None:
        """Start the clock."""
        self.progress.clock.lap()

    def on_step(self, run: Run) -> None:
        """Count, and log where it is due."""
        self.examples += run.plan.examples_in_step(run.step - 1)
        if run.is_due(run.settings.log_every):
            self._log(run)
        self._tell_skips()

    def before_checkpoint(self, run: Run) -> None:
        """Record the steps up to the checkpoint that were skipped."""
        self._tell_skips()

    def on_rollback(self, run: Run) -> None:
        """Count from the checkpoint on."""
        self.logged_step, self.examples = run.step, 0
        self.progress.clock.lap()

    def on_end(self, run: Run) -> None:
        """Log what is left."""
        if self.logged_step < run.step:
            self._log(run)

    def _tell_skips(self) -> None:
        skipped = self.progress.skipped
        for step, loss in list(skipped.items())[self.skips_told :] if len(skipped) > self.skips_told else ():
            self.reporter.skipped(step, loss)
        self.skips_told = len(skipped)

    def _log(self, run: Run) -> None:
        self.progress.check_losses()
        self._tell_skips()
        if run.loss is None:
            return  # every step so far was skipped
        seconds, steps = self.progress.clock.lap(), run.step - self.logged_step
        rate = self.examples / seconds
        self.rates.append((self.logged_step, rate))
        self.reporter.train(run.step, round(run.epoch, 4), run.loss, run.learning_rate, round(rate, 2), seconds / steps)
        self.logged_step, self.examples = run.step, 0
        with self.progress.clock.paused():
            self.tell("on_log")

    @property
    def images_per_second(self) -> float | None:
        """Median over the log lines, the first steps of this process left out; None where there is no line."""
        first = self.progress.first_step + STEPS_LEFT_OUT
        rates = [rate for start, rate in self.rates if start >= first] or [rate for _, rate in self.rates]
        return round(statistics.median(rates), 2) if rates else None


class MovingStatistics:
    """The variables that differ between ranks: batch norm's moving statistics.

    Ranks average them before an evaluation or a checkpoint, which needs the same values on all ranks.
    """

    def __init__(self, variables: Sequence[keras.Variable], averaged_step: int) -> None:
        """`averaged_step`: the step after which they were last the same on all ranks."""
        self.variables = variables
        self.averaged_step = averaged_step

    def average(self, step: int) -> None:
        """Average them over the ranks, at most once a step, since each average rounds. A collective."""
        if self.averaged_step != step:
            collectives.average_variables(self.variables)
            self.averaged_step = step


class ReplicaCheck(Callback):
    """Compares the ranks' variables, bit for bit, every --check-sync-every steps and before each checkpoint.

    The first step of a process is followed by a comparison, since a net or optimizer that lets ranks drift apart shows
    there.
    """

    def __init__(self, progress: Progress, state: State, statistics: MovingStatistics, reporter: Reporter) -> None:
        self.progress = progress
        self.state = state
        self.statistics = statistics
        self.reporter = reporter
        self.checked_step = -1  # the step of the last comparison

    def on_step(self, run: Run) -> None:
        """Compare where it is due."""
        is_first = run.settings.check_sync_every > 0 and run.step == self.progress.first_step + 1
        if is_first or run.is_due(run.settings.check_sync_every):
            self.check(run, everything=False)

    def before_checkpoint(self, run: Run) -> None:
        """Compare all that the checkpoint will hold."""
        self.check(run, everything=True)

    def check(self, run: Run, everything: bool) -> None:
        """Compare now.

        Args:
            everything: compare also the variables of `MovingStatistics`, which the ranks have just averaged.

        Raises:
            TrainingError: on every rank, where they differ.
        """
        self.progress.check_losses()
        with self.progress.clock.paused():
            began = time.perf_counter()
            variables = self.state.replicated([] if everything else self.statistics.variables)
            found = find_divergence(variables)
            if found is not None:
                advice = self._advice(found)
                raise TrainingError(f"{OUT_OF_SYNC} after step {run.step}: {found}; {self.progress.kept}{advice}")
            self.checked_step = run.step
            self.state.check_seconds.assign_add(time.perf_counter() - began)

    def _advice(self, found: Divergence) -> str:
        """What a user can do about state of a layer that each rank changes by its own examples."""
        local = set(map(id, self.statistics.variables))
        states = {v.path for v in self.state.net.model.non_trainable_variables if id(v) not in local}
        if found.variable not in states:
            return ""
        return "; if its layer changes it by a rank's own examples, name it moving_mean"


class Evaluator(Callback):
    """Evaluates every --eval-every steps, with averaged weights where the recipe keeps them.

    Evaluations during training use the examples that are held out (--hold-out), or else the test set. The last
    evaluation uses both.
    """

    def __init__(
        self,
        progress: Progress,
        parts: Mapping[str, Callable[[bool], Evaluation]],
        statistics: MovingStatistics,
        averages: Any,
        reporter: Reporter,
        tell: Tell,
    ) -> None:
        """`parts`: evaluators, by "test" and, with --hold-out, "validation"; `averages`: a MovingAverage or None."""
        self.progress = progress
        self.parts = parts
        self.watched = "validation" if "validation" in parts else "test"
        self.statistics = statistics
        self.averages = averages
        self.reporter = reporter
        self.tell = tell
        self.newest: dict[str, Evaluation] = {}  # by part

    def _after_start(self, run: Run) -> None:
        """Make the evaluation that an earlier process left out because it had to stop."""
        stays = not self.progress.stop_requested
        if (
            stays
            and self._is_due(run)
            and not collectives.broadcast_object(run.step in self.reporter.evaluated[self.watched])
        ):
            self.run_now(run, self.watched)

    def on_step(self, run: Run) -> None:
        """Evaluate where it is due. `on_end` evaluates after the last step."""
        if run.evaluation_is_due:  # by these ranks or by others
            self.progress.check_losses()  # tells of a request to stop, for which the evaluation is put off
        if self._is_due(run) and not self.progress.stop_requested:
            self.run_now(run, self.watched)

    def on_rollback(self, run: Run) -> None:
        """Forget evaluations, which may be of later steps."""
        self.newest.clear()

    def on_end(self, run: Run) -> None:
        """Evaluate before the last checkpoint is written: a net that has diverged is not saved."""
        if self.watched != "test" and not run.world.beside and not self._is_newest(run, self.watched):
            self.run_now(run, self.watched)
        self.final(run)

    def _is_due(self, run: Run) -> bool:
        return run.world.beside is None and run.evaluation_is_due

    def _is_newest(self, run: Run, part: str) -> bool:
        return part in self.newest and self.newest[part].step == run.step

    def final(self, run: Run) -> Evaluation:
        """The evaluation on the test set at the last step."""
        six_views = run.recipe.test_time_augmentation
        if self._is_newest(run, "test") and self.newest["test"].views == (6 if six_views else 1):
            return self.newest["test"]
        return self.run_now(run, "test", six_views)

    def run_now(self, run: Run, part: str, six_views: bool = False) -> Evaluation:
        """Evaluate on a part of the data set. A collective.

        Raises:
            Diverged: where the loss is not finite.
        """
        self.progress.check_losses()  # before the clock pauses: the wait for the device belongs to the steps
        with self.progress.aside("evaluation"):
            self.statistics.average(run.step)
            if self.averages:
                self.averages.swap()
            found = replace(self.parts[part](six_views), step=run.step)
            if self.averages:
                self.averages.swap()
            if not math.isfinite(found.loss):
                raise self.progress.diverged(f"{part} loss = {found.loss} at step {run.step}", run.step)
            self.newest[part] = found
            self.reporter.evaluation(run.step, round(run.epoch, 4), found.values, part)
            self.tell("on_evaluation", found)
        return found


class ConfusionWriter(Callback):
    """Writes confusion.json after each evaluation on the test set."""

    def __init__(self, dataset: Dataset, reporter: Reporter) -> None:
        self.dataset = dataset
        self.reporter = reporter

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Write the file. A file that cannot be written does not end the run."""
        if evaluation.confusion is not None and evaluation.part == "test":
            found = evaluation.confusion
            collectives.on_root(lambda: self._write(run, found))

    def _write(self, run: Run, found: Confusion) -> None:
        try:
            found.write(run.run_dir, self.dataset, run.step)
        except OSError as failure:
            self.reporter.warn(f"note: cannot write {run.run_dir / FILE}: {failure.strerror}")


class Checkpointer(Callback):
    """Writes a checkpoint every --checkpoint-every steps, when a rank is asked to stop, and at the end."""

    def __init__(
        self,
        progress: Progress,
        state: State,
        checkpoints: Checkpoints | None,
        statistics: MovingStatistics,
        reporter: Reporter,
        tell: Tell,
    ) -> None:
        """`checkpoints`: None on ranks other than 0."""
        self.progress = progress
        self.state = state
        self.checkpoints = checkpoints
        self.statistics = statistics
        self.reporter = reporter
        self.tell = tell
        self.seconds_before = 0.0  # of training, in earlier processes
        self.began = 0.0

    def on_start(self, run: Run) -> None:
        """Start the clock of the run."""
        self.seconds_before = float(self.state.seconds.numpy())
        self.began = time.perf_counter()

    def _after_start(self, run: Run) -> None:
        """Save where the run stops before its first step, or a rollback may need it."""
        if run.settings.on_nan == "rollback" or self.progress.stop_requested:
            self.save(run)

    def on_step(self, run: Run) -> None:
        """Save where it is due, where the run stops, and where rank 0 could not write another file."""
        progress = self.progress
        due = run.is_due(run.settings.checkpoint_every) or progress.stop_requested or progress.save_requested
        if due and run.step < run.total_steps:  # the last step is saved after its evaluation
            self.save(run)

    def on_end(self, run: Run) -> None:
        """Save the last step."""
        self.save(run)

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a resume, without set-up."""
        return self.seconds_before + time.perf_counter() - self.began

    def save(self, run: Run) -> None:
        """Write a checkpoint of this step, unless there is one. A collective."""
        self.progress.check_losses()
        with self.progress.aside("checkpoints"):
            self.statistics.average(run.step)
            self.tell("before_checkpoint")
            if self.progress.saved_step != run.step:
                self.mark()
                path = collectives.on_root(self._save)
                self.progress.saved_step, self.progress.save_requested = run.step, False
                self.reporter.say(f"step {run.step}: saved {path}")
                self.tell("on_checkpoint", path)

    def mark(self) -> None:
        """Store step, seconds and counters in the state, which is about to be saved or copied."""
        state, progress = self.state, self.progress
        state.step.assign(progress.step)
        state.seconds.assign(self.seconds)
        state.skipped.assign(progress.skipped_before + len(progress.skipped))
        state.rollbacks.assign(progress.rollbacks)
        state.rate_factor.assign(progress.rate_factor)

    def _save(self) -> Path:
        """Rank 0's part. UserError where the checkpoint, or another file of the run, cannot be written."""
        assert self.checkpoints is not None
        path = self.checkpoints.save()
        try:
            self.reporter.catch_up()
        except UserError as failure:
            raise UserError(f"{failure}; the checkpoint {path.name} is kept") from None
        return path


class Timekeeper(Callback):
    """Marks where the wall time goes, for `reporting.goodput`."""

    def __init__(self, progress: Progress, reporter: Reporter) -> None:
        self.progress = progress
        self.reporter = reporter

    def on_start(self, run: Run) -> None:
        """Mark the end of set-up."""
        self._mark_spans()
        self.reporter.mark("start", step=run.step)

    def _after_start(self, run: Run) -> None:
        """Mark evaluation and checkpoint before the first step."""
        self._mark_spans()

    def on_step(self, run: Run) -> None:
        """Mark evaluations and checkpoints since the last step."""
        self._mark_spans()
        self.reporter.beat()

    def on_rollback(self, run: Run) -> None:
        """Mark the step from which the run continues."""
        self._mark_spans()
        self.reporter.mark("rollback", step=run.step)

    def on_end(self, run: Run) -> None:
        """Mark evaluations and checkpoints after the last step."""
        self._mark_spans()

    def _mark_spans(self) -> None:
        for kind, step, began, ended in self.progress.spans:
            self.reporter.mark(kind, time=ended, began=began, step=step)
        self.progress.spans.clear()


class Summariser(Callback):
    """Compares the digests of all ranks, and writes summary.json."""

    def __init__(
        self,
        logger: Logger,
        replicas: ReplicaCheck,
        evaluator: Evaluator,
        checkpointer: Checkpointer,
        results: dict[str, Any],
    ) -> None:
        """`results`: what `Run.evaluation` and `Run.summary` read; this callback fills it."""
        self.logger = logger
        self.replicas = replicas
        self.evaluator = evaluator
        self.checkpointer = checkpointer
        self.results = results

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Make the newest evaluation `Run.evaluation`."""
        self.results["evaluation"] = evaluation

    def on_end(self, run: Run) -> None:
        """Compare digests, and write the summary."""
        found, state, reporter = self.evaluator.final(run), self.checkpointer.state, self.evaluator.reporter
        self.results["evaluation"] = found
        seconds = self.checkpointer.seconds
        own = set(map(id, random_states(run.model)))
        digest = collectives.digest(v for v in run.model.variables if id(v) not in own)
        digests = collectives.all_gather_object(digest)
        last = collectives.broadcast_object(reporter.last_train)
        summary = {
            "dataset": run.dataset,
            "model": run.settings.model,
            "world_size": run.world.size,
            "global_batch_size": run.plan.global_batch_size,
            "steps": run.step,
            "epochs": round(run.epoch, 4),
            "seed": run.settings.seed,
            "precision": run.settings.precision,
            "train_loss": last.get("loss"),
            "test_accuracy": found.accuracy,
            "test_loss": found.loss,
            "test_views": found.views,
            "test_accuracy_of_one_view": found.plain_accuracy,
            "test_examples": found.examples,
            "images_per_second": self.logger.images_per_second or last.get("images_per_second"),
            "training_seconds": round(seconds, 3),
            "replicas_identical": self.replicas.checked_step == run.step and len(set(digests)) == 1,
            "skipped_steps": int(state.skipped.numpy()),
            "rollbacks": int(state.rollbacks.numpy()),
            "learning_rate_factor": float(state.rate_factor.numpy()),
            "sync_check_seconds": round(float(state.check_seconds.numpy()), 6),
            "weights_sha256": digests[0],
            "weights_sha256_by_rank": digests,
            "best_evaluation": self.results.get("best"),
            "newest_evaluation": self.results.get("newest"),
            "stopped_early": self.evaluator.progress.ends_early or None,
            "evaluations_missing": sorted(reporter.missed),
            "goodput": goodput.shares([*reporter.marks, {"mark": "end", "time": time.time(), "step": run.step}]),
            "versions": versions(),
        }
        self.results["summary"] = collectives.broadcast_object(summary)
        collectives.on_root(lambda: reporter.summary(summary))
        reporter.say(
            f"{run.dataset}, {run.settings.model}: test accuracy {found.accuracy:.2%} after {run.step} steps "
            f"({run.epoch:.2f} epochs) in {seconds:.1f} s; {run.run_dir / 'summary.json'}"
        )
        reporter.say(goodput.in_words(run.summary["goodput"]))


def check_interface(callbacks: Sequence[Any]) -> None:
    """UserError where an object is not a `Callback`."""
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise UserError(f"--callbacks: {callback!r} is no Callback; derive its class from hvd_cifar.Callback")
