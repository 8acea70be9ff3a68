"""The training loop. Read this file first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import RESUME, Diverged, Preempted, TrainingError, UserError, reason_of
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.reporting.view import Course
from hvd_cifar.runtime import environment
from hvd_cifar.runtime.failures import lost_rank
from hvd_cifar.training.callbacks import Callback
from hvd_cifar.training.preemption import StopRequests
from hvd_cifar.training.progress import Progress, Run
from hvd_cifar.training.run_dir import read_summary
from hvd_cifar.training.step import Notes, TrainStep

PACKAGE = f"{__name__.partition('.')[0]}."
LONGEST_WHY = 300  # characters of an error in the run's record


@dataclass(frozen=True)
class OfUser:
    """Objects that a Python program passes instead of names. None: the settings name the object."""

    model: Callable[..., Any] | None = None
    dataset: Dataset | Callable[[], Dataset] | None = None
    callbacks: Sequence[Callback] = ()


class Trainer:
    """The loop over global steps. Callbacks do everything else."""

    def __init__(
        self,
        run: Run,
        progress: Progress,
        step: TrainStep,
        batches: Callable[[int], Iterator[list[MicroBatch]]],
        reporter: Reporter,
        sizes: ImageSizes,
    ) -> None:
        """`progress`: the state that `run` shows. `batches`: step -> this rank's micro-batches of each later step."""
        self.run = run
        self.progress = progress
        self.step = step
        self.batches = batches
        self.reporter = reporter
        self.sizes = sizes
        self.callbacks: Sequence[Callback] = ()
        self.go_back: Callable[[Diverged], None] | None = None  # with --on-nan rollback

    def train(self) -> dict[str, Any]:
        """Make the remaining steps, and return the run's summary. A collective.

        Raises:
            Preempted: on all ranks, after a checkpoint, where a signal asks one of them to stop.
        """
        if self.progress.step == self.run.total_steps:
            done: dict[str, Any] = collectives.broadcast_object(read_summary(self.run.run_dir))
            if done.get("steps") == self.progress.step:
                self.reporter.say(f"nothing left to do after step {self.run.step}: see {self.run.run_dir}/summary.json")
                return done
        with self._open() as requests:
            self.tell("on_start")
            has_begun = False
            while True:
                try:
                    if not has_begun:  # an evaluation that a stop has put off may find that the run diverged
                        self.tell("_after_start")
                        has_begun = True
                        self._stop_where_asked()
                    self._make_steps(requests)
                    self.tell("on_end")
                    return dict(self.run.summary)
                except Diverged as failure:  # raised on all ranks alike, since they have the same losses
                    if self.go_back is None:
                        raise
                    self.go_back(failure)

    def _make_steps(self, requests: StopRequests) -> None:
        watch = self.progress.watch
        for micro_batches in watch.each("batch", self.batches(self.progress.step)):
            if self.progress.ends_early:
                break
            watch.mark("step", self.run.step + 1)
            seconds = self.progress.seconds_per_step if self.run.world.is_root else 0.0
            news = float(self.progress.has_news)
            notes = Notes(float(requests.made), float(self.reporter.is_behind), seconds, news)
            result = self.step(self.progress.step, micro_batches, self.progress.rate_factor, notes)
            self.progress.add(micro_batches, result)
            self.tell("on_step")
            self._stop_where_asked()

    def _stop_where_asked(self) -> None:
        # A request that was noticed after `Checkpointer` waits for a step.
        saved = self.progress.saved_step == self.progress.step
        if self.progress.stop_requested and saved and self.progress.step < self.run.total_steps:
            self.reporter.warn(
                f"stopped after step {self.run.step}; {self.progress.kept}; to go on, give the same "
                f"command with --run-dir {self.run.run_dir} (exit code {RESUME})"
            )
            raise Preempted

    def tell(self, event: str, *values: Any) -> None:
        """Call the method `event` of every callback, in order."""
        for callback in self.callbacks:
            with self.progress.watch.phase(f"{type(callback).__name__}.{event}"):
                try:
                    getattr(callback, event)(self.run, *values)
                except (UserError, TrainingError) as error:
                    # This package's callbacks raise them on all ranks, but may pass on those of a user's.
                    error.of_one_rank |= not type(callback).__module__.startswith(PACKAGE)
                    raise

    @contextlib.contextmanager
    def _open(self) -> Iterator[StopRequests]:
        """A context in which signals are requests to stop, and the run's files are open. An error closes them also."""
        first, total = self.run.step, self.run.total_steps
        requests = StopRequests(
            self.run.settings.grace_seconds, self.run.world.is_root, lambda: str(self.progress.kept)
        )
        with requests, self._files(first, total):
            yield requests

    def _begin_files(self, first: int, total: int) -> None:
        """Rank 0's part. UserError where a file cannot be written."""
        if first < total:
            self.reporter.withdraw_summary()
        self.reporter.open(first, self.run.settings.record_examples)
        world = self.run.world
        told = {"ends": environment.ends(), "ranks": world.size, "elastic": world.elastic is not None}
        self.reporter.begin_session(environment.starts(), **told)

    @contextlib.contextmanager
    def _files(self, first: int, total: int) -> Iterator[None]:
        collectives.on_root(lambda: self._begin_files(first, total))
        try:
            plan = self.run.plan
            with self.reporter.progress(first, Course(plan.global_batch_size, total, plan.steps_per_epoch, self.sizes)):
                yield
        except BaseException as failure:
            how = {"how": "stopped"} if isinstance(failure, Preempted) else {"how": "failed", "why": _why(failure)}
            self.reporter.mark("end", step=self.progress.step, **how)
            raise
        else:
            self.reporter.mark("end", step=self.progress.step, how="complete")


def _why(failure: BaseException) -> str:
    """Why a run failed, in one line for its record."""
    if isinstance(failure, (UserError, TrainingError)):
        return " ".join(str(failure).split())[:LONGEST_WHY]
    if words := lost_rank(failure):
        return f"another rank is lost ({words})"
    return f"{type(failure).__name__}: {reason_of(failure)}"
