"""Training, top to bottom. Read this file first, then step.py and state.py.

`train` starts the rank, `assemble` makes everything before the first step in the order in which it can fail, and
`Trainer` makes the steps. All else that a run does is a callback: `training.routines` (log, evaluate, save, sum up),
`extensions`, and the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvd_cifar import extensions
from hvd_cifar.config import TrainSettings
from hvd_cifar.distributed import collectives, prove_averaging
from hvd_cifar.distributed.batch_norm import local_statistics
from hvd_cifar.errors import RESUME, Preempted, UserError
from hvd_cifar.models import finish_all
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime import environment
from hvd_cifar.runtime.watch import IDLE, Watch
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import net_checks, record, run_dir, user_code
from hvd_cifar.training.callbacks import Callback, Run
from hvd_cifar.training.checkpoint import Checkpoints, restore
from hvd_cifar.training.plan import is_deterministic, make_schedule, threads_of
from hvd_cifar.training.preemption import StopRequests
from hvd_cifar.training.progress import Progress
from hvd_cifar.training.routines import Checkpointer, Evaluator, Logger, Summariser
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.step import Averaging, make_train_step
from hvd_cifar.training.work import UserObjects, Work, make_averages, make_net, make_optimizer, prepare, step_spec


def train(settings: TrainSettings, given: UserObjects | None = None) -> dict[str, Any]:
    """Train as the settings say, on all ranks of this job; return what summary.json holds, the same on every rank.

    UserError where a setting does not fit the machine, the data or the run directory. TrainingError where the loss is
    not finite, gradients are not averaged, or ranks are out of sync. Preempted (exit code 75) where it was asked to
    stop.
    """
    watch = Watch(settings.stall_seconds)
    try:
        with session(threads_of(settings), is_deterministic(settings), watch=watch) as world:
            watch.mark("set-up")
            try:
                summary = assemble(settings, world, given or UserObjects(), watch).train()
            finally:
                run_dir.release()  # which `assemble` has claimed
            watch.mark("shutdown")
            return summary
    finally:
        watch.mark(IDLE)


def assemble(settings: TrainSettings, world: World, given: UserObjects, watch: Watch | None = None) -> Trainer:
    """Make everything that a run needs before its first step. A collective.

    The run directory stays locked until `run_dir.release`, also after an error.
    """
    # Settings to data, recipe and batch arithmetic. A resumed run keeps its batch and precision, unless others are
    # given, and the user's files as it copied them.
    settings = collectives.on_root(lambda: run_dir.continue_run(settings))
    user_code.use_copies(collectives.on_root(lambda: user_code.to_continue(settings)))
    work = prepare(settings, world, given)
    if work.settings.deterministic:
        world = replace(world, algorithm="all-to-all and all-gather")  # for lines of output; nothing compares it
    schedule = make_schedule(work.settings, work.recipe, work.plan)

    # The run directory, and the checkpoint to begin with.
    facts = record.must_match(work, world, schedule, given)
    folder, newest = collectives.on_root(lambda: run_dir.claim(work.settings, record.compared(work.settings, facts)))

    # Net, optimizer and averages, freshly initialised: the state of the run. Then all that observes its steps.
    run, averages = collectives.on_every_rank(lambda: _build(work, world, schedule, folder, Progress(watch)))
    net_checks.refuse_unlike(run)  # nets that differ between ranks
    for line in record.describe(run):
        run.say(line)
    _add_callbacks(run, averages, given)

    # Proof that the ranks' shares add up to the gradient of the global batch's mean loss.
    proof = prove_averaging(run.optimizer, contributions="sum")
    run.say(f"start-up proof: {proof}")

    # The state to begin with.
    source = _restore(run, newest)
    record.write(run, given, facts)
    run.say(f"run directory {folder}")
    if source:
        run.say(f"resumed from {source} at step {run.step}")
    run.progress.watch.run_dir = folder  # for the stacks of a rank that hangs
    run.progress.watch.waits_in_step = run.progress.waits.is_running
    return Trainer(run)


def _add_callbacks(run: Run, averages: Sequence[Any], given: UserObjects) -> None:
    """Give the run its callbacks, in their order, and its observers of the step. A collective."""
    users = given.callbacks or [user_code.callback(spec) for spec in run.settings.callbacks]
    if wrong := [one for one in users if not isinstance(one, Callback)]:
        raise UserError(f"--callbacks: {wrong[0]!r} is no Callback; derive its class from hvd_cifar.Callback")
    # By their names in `extensions.ORDER`.
    core = {"LOG": Logger(), "EVALUATE": Evaluator(averages), "SAVE": Checkpointer(), "SUM UP": Summariser()}
    run.callbacks = [*extensions.in_order(run, core), *users]
    run.observe(run.progress.waits)
    run.tell("on_build")
    for average in averages:  # last: they follow weights that another observer may still change
        run.observe(Averaging(average))


def _build(work: Work, world: World, schedule: Schedule, folder: Path, progress: Progress) -> tuple[Run, list[Any]]:
    """The run with a new net and optimizer, and the averages of its weights. UserError where settings do not fit."""
    net, averages = make_net(work), []
    optimizer = make_optimizer(work, net, schedule(0))
    state = TrainState(net.model, optimizer)
    if not work.settings.virtual_shards:  # with them each step averages the statistics itself
        state.declare_own(local_statistics(net.model))
    for name, average in make_averages(work.recipe, net, work.plan.all_steps).items():
        state.add(name, average.variables, core=True)
        averages.append(average)
    root_folder = folder if world.is_root else None
    checkpoints = Checkpoints(root_folder / "checkpoints", state) if root_folder else None
    reporter = Reporter(root_folder, work.dataset.name, work.plan.total_steps, work.settings.quiet)
    run = Run(work, net, state, world, collectives, schedule, progress, folder, reporter, checkpoints)
    return run, averages


def _restore(run: Run, newest: Path | None) -> str:
    """Give all ranks the newest state, and return where it came from; "": it is the initial one. A collective."""
    state = run.state
    if newest is not None:
        collectives.on_root(lambda: restore(state, newest))
    state.broadcast()
    is_of_this_run = newest is not None and newest.parent == run.run_dir / "checkpoints"
    saved_step = int(state.step.numpy()) if is_of_this_run else -1
    newer = [source for source in run.tell("on_restore") if source]  # of callbacks with a newer state, such as a copy
    finish_all(run.model)  # layers that prepare numbers from their weights, such as Normalization
    state.draw_apart(run.world.rank)
    run.progress.begin(int(state.step.numpy()), saved_step)
    return newer[-1] if newer else str(newest or "")


class Trainer:
    """The loop over global steps. Callbacks do everything else."""

    def __init__(self, run: Run) -> None:
        self.run = run
        flags = len(run.progress.own_flags)
        self.steps = {
            side: make_train_step(run.net, run.optimizer, step_spec(run.work, side, flags), run.observers)
            for side in run.work.sizes.sides
        }

    def train(self) -> dict[str, Any]:
        """Make the remaining steps, and return the run's summary. A collective.

        Preempted on all ranks, after a checkpoint, where a signal asks one of them to stop.
        """
        run = self.run
        if run.step == run.total_steps:
            done: dict[str, Any] = collectives.on_root(lambda: run_dir.read_summary(run.run_dir))
            if done.get("steps") == run.step:
                # The launcher counts a start as successful only if that start writes a summary.
                collectives.on_root(lambda: run.reporter.summary(done))
                run.say(f"nothing left to do after step {run.step}: see {run.run_dir}/summary.json")
                return done
        with self._open() as requests:
            run.tell("on_start")
            run.reporter.mark("start", step=run.step)
            run.tell("before_steps")
            self._make_steps(requests)
            run.tell("on_end")
            return dict(run.summary)

    def _make_steps(self, requests: StopRequests) -> None:
        run, progress = self.run, self.run.progress
        for micro_batches in progress.watch.each("batch", run.work.batches(run.world, run.step)):
            if progress.ends_early:
                break
            # The step's number determines its image size.
            side = run.work.sizes(run.step)
            progress.watch.mark("step" if len(self.steps) == 1 else f"step at {side} pixels", run.step + 1)
            # Flags reach all ranks with the loss. `Checkpointer` saves for them, in `on_step`. Rank 0 asks for a
            # checkpoint by its clock, or where a file could not be written: the run then ends with that error.
            is_root = run.world.is_root
            asks_to_save = is_root and (run.reporter.is_behind or progress.save_is_due(run.settings.checkpoint_minutes))
            flags = progress.flags_to_send(requests.made, asks_to_save, is_root)
            count = tf.constant(run.plan.examples_in_step(run.step))
            # Forward, loss, backward, all-reduce and update: step.py.
            result = self.steps[side](micro_batches, count, run.schedule(run.step), tf.constant(flags, tf.float32))
            progress.add(micro_batches, result)  # `run.step` is this step's number from here on
            run.tell("on_step")
            run.reporter.beat()
            self._stop_where_asked()

    def _stop_where_asked(self) -> None:
        """Preempted, once `Checkpointer` has saved the step at which all ranks learned of a request to stop."""
        run, progress = self.run, self.run.progress
        # A request that comes after this step was saved is served after the next step.
        if progress.stop_requested and progress.saved_step == run.step and run.step < run.total_steps:
            run.warn(
                f"stopped after step {run.step}; {progress.kept}; to go on, give the same "
                f"command with --run-dir {run.run_dir} (exit code {RESUME})"
            )
            raise Preempted

    @contextlib.contextmanager
    def _open(self) -> Iterator[StopRequests]:
        """A context in which signals are requests to stop; the files say how it begins and ends, also by an error."""
        run = self.run
        requests = StopRequests(run.settings.grace_seconds, run.world.is_root, lambda: str(run.progress.kept))
        with requests:
            collectives.on_root(self._open_files)
            try:
                yield requests
                ending = {"how": "complete"}
            except Preempted:
                ending = {"how": "stopped"}
                raise
            except BaseException as failure:
                ending = {"how": "failed", "why": record.why_failed(failure)}
                raise
            finally:
                run.reporter.mark("end", step=run.step, **ending)

    def _open_files(self) -> None:
        """Rank 0's part. UserError where a file cannot be written."""
        run = self.run
        if run.step < run.total_steps:
            run.reporter.withdraw_summary()
        run.reporter.open(run.step)
        told = {"ranks": run.world.size, "elastic": run.world.elastic is not None}
        run.reporter.begin_session(**environment.launch_of_run()._asdict(), **told)
