"""What every run does besides its steps, as callbacks: log, evaluate, save, sum up."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hvd_cifar.distributed.collectives import digest, random_states
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.reporting import sessions
from hvd_cifar.runtime.world import versions
from hvd_cifar.training.callbacks import Callback, Run
from hvd_cifar.training.evaluate import Evaluation, make_evaluator

STEPS_LEFT_OUT = 10  # of the throughput: tracing and cold caches slow the first steps down


class Logger(Callback):
    """Writes a log line every --log-every steps, and checks all losses since the last one."""

    def __init__(self) -> None:
        self.logged_step, self.logged_seconds = 0, 0.0  # at the last line
        self.examples = 0  # since then
        self.rates: list[tuple[int, float]] = []  # first step of each log line, and its images/s

    def on_start(self, run: Run) -> None:
        self.logged_step, self.logged_seconds, self.examples = run.step, run.progress.clock.seconds, 0

    def on_step(self, run: Run) -> None:
        self.examples += run.plan.examples_in_step(run.step - 1)
        if run.is_due(run.settings.log_every):
            self._log(run)

    def on_end(self, run: Run) -> None:
        if self.logged_step < run.step:
            self._log(run)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        """Add the median throughput over the log lines, the first steps of this process left out."""
        first = run.progress.first_step + STEPS_LEFT_OUT
        rates = [rate for start, rate in self.rates if start >= first] or [rate for _, rate in self.rates]
        measured = round(statistics.median(rates), 2) if rates else None
        summary["images_per_second"] = measured or run.reporter.last_train.get("images_per_second")
        summary["train_loss"] = run.reporter.last_train.get("loss")

    def _log(self, run: Run) -> None:
        run.progress.check_losses()
        losses = run.progress.losses
        assert losses is not None, "there was a step"
        now, steps = run.progress.clock.seconds, run.step - self.logged_step
        seconds = now - self.logged_seconds
        rate = self.examples / seconds
        self.rates.append((self.logged_step, rate))
        run.reporter.train(
            run.step, round(run.epoch, 4), losses.total_loss, run.learning_rate, round(rate, 2), seconds / steps
        )
        run.reporter.show(run.step, losses._asdict())
        self.logged_step, self.logged_seconds, self.examples = run.step, now, 0
        with run.progress.clock.paused():
            run.tell("on_log")


class Evaluator(Callback):
    """Evaluates every --eval-every steps, with averaged weights where the recipe keeps them.

    Evaluations during training use the examples that are held out (--hold-out), or else the test set. The last
    evaluation uses both.
    """

    def __init__(self, averages: Sequence[Any]) -> None:
        """`averages`: of the run's weights, of which evaluations use the moving one."""
        self.averages = next((one for one in averages if isinstance(one, MovingAverage)), None)
        self.newest: dict[str, Evaluation] = {}  # by part

    def on_build(self, run: Run) -> None:
        data, transforms, world = run.data, run.work.transforms, run.world
        parts = {"test", run.watched}
        self.evaluators = {part: make_evaluator(run.model, data, transforms, world, part) for part in parts}

    def before_steps(self, run: Run) -> None:
        """Make the evaluation that an earlier process left out because it had to stop."""
        if self._is_due(run):
            is_done = run.ranks.broadcast_object(run.step in run.reporter.evaluated[run.watched])
            if not is_done:
                self.run_now(run, run.watched)

    def on_step(self, run: Run) -> None:
        if run.evaluation_is_due:  # by these ranks or by others
            run.progress.check_losses()  # tells of a request to stop, for which the evaluation is put off
        if self._is_due(run):
            self.run_now(run, run.watched)

    def on_end(self, run: Run) -> None:
        """Evaluate before the last checkpoint is written: a net that has diverged is not saved."""
        if run.watched != "test" and not self._is_newest(run, run.watched):
            self.run_now(run, run.watched)
        self.final(run)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        run.evaluation = self.final(run)
        summary |= run.evaluation.summary

    def _is_due(self, run: Run) -> bool:
        return run.is_evaluated_here and run.evaluation_is_due and not run.progress.stop_requested

    def _is_newest(self, run: Run, part: str) -> bool:
        return part in self.newest and self.newest[part].step == run.step

    def final(self, run: Run) -> Evaluation:
        """The evaluation on the test set at the last step."""
        many = run.recipe.test_time_augmentation
        if self._is_newest(run, "test") and self.newest["test"].views == (6 if many else 1):
            return self.newest["test"]
        return self.run_now(run, "test", many)

    def run_now(self, run: Run, part: str, six_views: bool = False) -> Evaluation:
        """Evaluate on a part of the data set. A collective. TrainingError where the loss is not finite."""
        run.progress.check_losses()  # before the clock pauses: the wait for the device belongs to the steps
        with run.aside("evaluation"):
            run.state.average(run.step)
            if self.averages:
                self.averages.swap()
            found = replace(self.evaluators[part](six_views), step=run.step)
            if self.averages:
                self.averages.swap()
            if not math.isfinite(found.loss):
                raise run.progress.diverged(f"{part} loss = {found.loss} at step {run.step}", run.step)
            self.newest[part] = run.evaluation = found
            run.reporter.evaluation(run.step, round(run.epoch, 4), found.values, part)
        with run.progress.clock.paused():
            run.tell("on_evaluation", found)
        return found


class Checkpointer(Callback):
    """Writes checkpoints: by --checkpoint-every and --checkpoint-minutes, where the run stops, and at the end."""

    def __init__(self) -> None:
        self.seconds_before = 0.0  # of training, in earlier processes
        self.began = 0.0

    def on_start(self, run: Run) -> None:
        self.seconds_before = float(run.state.seconds.numpy())
        self.began = time.perf_counter()

    def on_step(self, run: Run) -> None:
        """Save where it is due, where the run stops, and where rank 0 asks: by its clock, or for another file."""
        if run.step == run.total_steps:  # is saved after its evaluation
            return
        if run.is_due(run.settings.checkpoint_every):
            run.save()
        elif run.progress.stop_requested or run.progress.flags["save"] > 0:
            # Averages round. The variables go on as they were, or results would depend on the clock.
            with run.state.own_put_back():
                run.save()

    def on_end(self, run: Run) -> None:
        run.save()

    def before_save(self, run: Run) -> None:
        run.state.step.assign(run.step)
        run.state.seconds.assign(self.seconds)

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        summary["training_seconds"] = round(self.seconds, 3)

    @property
    def seconds(self) -> float:
        """Seconds of training, including those before a resume, without set-up."""
        return self.seconds_before + time.perf_counter() - self.began


class Summariser(Callback):
    """Compares the digests of all ranks, and writes summary.json."""

    def on_end(self, run: Run) -> None:
        drawn = set(map(id, random_states(run.model)))
        digests = run.ranks.all_gather_object(digest([v for v in run.model.variables if id(v) not in drawn]))
        summary = {
            "dataset": run.dataset,
            "model": run.settings.model,
            "world_size": run.world.size,
            "global_batch_size": run.plan.global_batch_size,
            "steps": run.step,
            "epochs": round(run.epoch, 4),
            "seed": run.settings.seed,
            "precision": run.settings.precision,
            "replicas_identical": len(set(digests)) == 1,
            "weights_sha256": digests[0],
            "weights_sha256_by_rank": digests,
            "stopped_early": run.progress.ends_early or None,
            "evaluations_missing": sorted(run.reporter.missed),
            "versions": versions(),
        }
        run.tell("on_summary", summary)
        end = {"mark": "end", "time": time.time(), "step": run.step}
        summary["goodput"] = sessions.shares([*run.reporter.marks, end])
        run.summary = run.ranks.broadcast_object(summary)
        run.ranks.on_root(lambda: run.reporter.summary(summary))
        seconds = run.summary["training_seconds"]
        run.say(
            f"{run.dataset}, {run.settings.model}: test accuracy {run.summary['test_accuracy']:.2%} after {run.step} "
            f"steps ({run.epoch:.2f} epochs) in {seconds:.1f} s; {run.run_dir / 'summary.json'}"
        )
        run.say(sessions.in_words(run.summary["goodput"]))
