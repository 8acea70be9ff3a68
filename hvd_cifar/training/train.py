"""Training, top to bottom. Read this file first, then step.py and state.py.

`train` starts the rank, `assemble` makes everything before the first step in the order in which it can fail, and
`Trainer` makes the steps. All else that a run does is a callback: `training.routines` (log, evaluate, save, sum up),
`extensions`, and the user's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from hvd_cifar import extensions
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.pipeline import MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler
from hvd_cifar.distributed import collectives, prove_averaging
from hvd_cifar.distributed.batch_norm import local_statistics
from hvd_cifar.errors import RESUME, Diverged, Preempted
from hvd_cifar.models.portable import finish_all
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.reporting.view import Course
from hvd_cifar.runtime import environment
from hvd_cifar.runtime.watch import IDLE, Watch
from hvd_cifar.runtime.world import World, session
from hvd_cifar.training import facts, net_checks, run_dir, user_code, user_files
from hvd_cifar.training.callbacks import Run, check_interface
from hvd_cifar.training.checkpoint import Checkpoints
from hvd_cifar.training.plan import is_deterministic, make_schedule, threads_of
from hvd_cifar.training.preemption import StopRequests
from hvd_cifar.training.progress import Progress
from hvd_cifar.training.ranks import Ranks
from hvd_cifar.training.routines import Checkpointer, Logger, Summariser, evaluator_of
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.step import Averaging, TrainStep, make_train_step
from hvd_cifar.training.work import UserObjects, Work, make_net, make_optimizer, prepare, step_spec


def train(settings: TrainSettings, given: UserObjects | None = None) -> dict[str, Any]:
    """Train as the settings say, on all ranks of this job; rank 0 prints and writes.

    Returns:
        The summary of the run, as in summary.json; the same on every rank.

    Raises:
        UserError: where a setting does not fit the machine, the data or the run directory.
        TrainingError: where the loss is not finite, gradients are not averaged, or ranks are out of sync.
    """
    watch = Watch(settings.stall_seconds)
    try:
        with session(threads_of(settings), is_deterministic(settings), watch=watch) as world:
            watch.mark("set-up")
            try:
                summary = assemble(settings, world, given or UserObjects(), watch).train()
            finally:
                run_dir.release()
            watch.mark("shutdown")
            return summary
    finally:
        watch.mark(IDLE)


def assemble(settings: TrainSettings, world: World, given: UserObjects, watch: Watch | None = None) -> Trainer:
    """Make everything that a run needs before its first step. A collective.

    The run directory stays locked until `run_dir.release`, also after an error.
    """
    # Settings to data, recipe and batch arithmetic.
    settings = collectives.on_root(lambda: run_dir.continue_run(settings))
    user_code.use_copies(collectives.on_root(lambda: user_files.to_continue(settings)))
    work = prepare(settings, world, given)
    if work.settings.deterministic:
        world = replace(world, algorithm="all-to-all and all-gather")
    kernels = facts.agree_on_kernels(world, work.settings)
    schedule = make_schedule(work.settings, work.recipe, work.plan)

    # Net, optimizer and averages, freshly initialised: the state of the run.
    run, averages = collectives.on_every_rank(lambda: _build(work, world, schedule, Progress(watch=watch)))
    net_checks.refuse_unlike(net := net_checks.structure(run), work.model.name)
    objects = [one for one in (given.model, given.dataset) if one is not None]
    of_course = user_files.modules_of(work.settings.model_copy(update={"callbacks": ()}), objects)
    own_callbacks = given.callbacks or [user_code.callback(spec) for spec in work.settings.callbacks]
    check_interface(own_callbacks)
    core = {
        "LOG": Logger(),
        "EVALUATE": evaluator_of(run, averages),
        "SAVE": Checkpointer(),
        "SUM UP": Summariser(),
    }
    run.callbacks = [*extensions.in_order(run, core), *own_callbacks]
    run.observe(run.progress.times)
    run.observe(net_checks.MissingGradients(run))
    run.tell("on_build")
    for average in averages:  # last: they follow weights that another observer may still change
        run.observe(Averaging(average))

    # Proof that the optimizer averages over the ranks.
    proof = prove_averaging(run.optimizer, contributions="sum")

    # The run directory, and the state to begin with.
    must_match = facts.must_match(work, given, schedule, kernels)
    compared = run_dir.compared(work.settings, must_match)
    run.run_dir, newest = collectives.on_root(lambda: run_dir.claim(work.settings, compared))
    if world.is_root:
        run.checkpoints = Checkpoints(run.run_dir / "checkpoints", run.state)
    own_folder = run.run_dir if world.is_root else None
    run.report_to(Reporter(own_folder, terminal.is_watched(), run.dataset, work.settings.quiet))
    source = _restore(run, newest)
    published = facts.published(work)
    record = {**must_match, **facts.of_run(run, published), "net": net, "job": environment.starts_of_job()}
    changed: list[str] = []  # against the record before this run's own
    if newest:
        collectives.on_root(lambda: user_files.refuse_other_net(settings, record))
        changed = collectives.on_root(lambda: run_dir.changed_kernels(newest.parent.parent, kernels))
    modules = user_files.modules_of(work.settings, [*objects, *given.callbacks])
    record["code"] = collectives.on_root(lambda: user_files.keep(run.run_dir, modules, of_course))
    named = work.settings.model_copy(update={"dataset": must_match["dataset"]})
    collectives.on_root(lambda: run_dir.record(run.run_dir, named, work.plan, record))

    # Lines about the run, and its steps.
    lines = [*facts.describe(run), *([facts.NOT_PUBLISHED] if published is False else [])]
    run.introduce(lines)
    run.say(f"start-up proof: {proof}")
    run.say(f"run directory {run.run_dir}")
    for line in changed:
        run.say(line)
    if source:
        run.say(f"resumed from {source} at step {run.step}")
    run.progress.watch.run_dir = run.run_dir
    run.progress.watch.waits_in_step = run.progress.times.is_waiting

    def step_of(side: int) -> Callable[..., Any]:
        spec = step_spec(work, side, len(run.progress.flags.own))
        return make_train_step(run.net, run.optimizer, spec, run.observers)

    return Trainer(run, TrainStep(step_of, work.sizes, schedule, work.plan))


def _build(work: Work, world: World, schedule: Schedule, progress: Progress) -> tuple[Run, list[Any]]:
    """The run with a new net and optimizer, and the averages of its weights.

    Raises:
        UserError: where the net and the settings do not fit.
    """
    net = make_net(work)
    weights, recipe = net.model.trainable_variables, work.recipe
    optimizer = make_optimizer(work, net, schedule(0))
    state = TrainState(net.model, optimizer, (work.settings.seed, work.plan.global_batch_size, work.plan.examples))
    if not work.settings.virtual_shards:  # with them each step averages the statistics itself
        state.keep_own(local_statistics(net.model))
    averages: list[Any] = []
    if recipe.lookahead:
        averages.append(Lookahead(weights, work.plan.all_steps))
        state.add_core("lookahead", averages[-1].variables)
    if recipe.ema_decay:
        averages.append(MovingAverage(weights, recipe.ema_decay))
        state.add_core("averages", averages[-1].variables)
    return Run(work, net, optimizer, state, world, Ranks(), schedule, progress), averages


def _restore(run: Run, newest: Path | None) -> str:
    """Give all ranks the newest state, and return where it came from; "": it is the initial one. A collective."""
    state, checkpoints = run.state, run.checkpoints
    if newest is not None:
        collectives.on_root(lambda: checkpoints.restore(newest) if checkpoints else None)
    state.broadcast()
    on_disk = int(state.step.numpy())
    is_own = newest is not None and newest.parent == run.run_dir / "checkpoints"
    saved_step = on_disk if is_own else -1
    newer = list(filter(None, run.tell("on_restore")))
    finish_all(run.model)
    state.draw_apart(run.world.rank)
    run.progress.begin(int(state.step.numpy()), saved_step)
    state.restored(saved_step)
    return newer[-1] if newer else str(newest or "")


class Trainer:
    """The loop over global steps. Callbacks do everything else."""

    def __init__(self, run: Run, step: TrainStep) -> None:
        self.run = run
        self.step = step
        run.progress.on_bad_loss = lambda step, loss: any(run.tell("on_bad_loss", step, loss))

    def train(self) -> dict[str, Any]:
        """Make the remaining steps, and return the run's summary. A collective.

        Raises:
            Preempted: on all ranks, after a checkpoint, where a signal asks one of them to stop.
        """
        run = self.run
        if run.step == run.total_steps:
            done: dict[str, Any] = collectives.broadcast_object(run_dir.read_summary(run.run_dir))
            if done.get("steps") == run.step:
                run.say(f"nothing left to do after step {run.step}: see {run.run_dir}/summary.json")
                return done
        with self._open() as requests:
            run.tell("on_start")
            has_begun = False
            while True:
                try:
                    if not has_begun:  # an evaluation that a stop has put off may find that the run diverged
                        run.tell("before_steps")
                        has_begun = True
                        self._stop_where_asked()
                    self._make_steps(requests)
                    run.tell("on_end")
                    return dict(run.summary)
                except Diverged as failure:  # raised on all ranks alike, since they have the same losses
                    if not any(run.tell("on_diverged", failure)):
                        raise

    def _make_steps(self, requests: StopRequests) -> None:
        run, progress = self.run, self.run.progress
        batches = progress.times.each(batches_of(run.work, run.world, run.step))
        for micro_batches in progress.watch.each("batch", batches):
            if progress.ends_early:
                break
            progress.watch.mark("step", run.step + 1)
            flags = progress.flags_to_send(requests.made, run.reporter.is_behind, run.world.is_root)
            # Forward, loss, backward, all-reduce and update: step.py.
            result = self.step(run.step, micro_batches, progress.rate_factor, flags)
            progress.add(micro_batches, result)
            run.tell("on_step")
            self._stop_where_asked()

    def _stop_where_asked(self) -> None:
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
        """A context in which signals are requests to stop, and the run's files are open. An error closes them also."""
        run = self.run
        requests = StopRequests(run.settings.grace_seconds, run.world.is_root, lambda: str(run.progress.kept))
        course = Course(run.plan.global_batch_size, run.total_steps, run.plan.steps_per_epoch, run.work.sizes)
        with requests:
            collectives.on_root(self._open_files)
            try:
                with run.reporter.progress(run.step, course):
                    yield requests
            except BaseException as failure:
                if isinstance(failure, Preempted):
                    run.reporter.mark("end", step=run.step, how="stopped")
                else:
                    run.reporter.mark("end", step=run.step, how="failed", why=facts.why_failed(failure))
                raise
            else:
                run.reporter.mark("end", step=run.step, how="complete")

    def _open_files(self) -> None:
        """Rank 0's part. UserError where a file cannot be written."""
        run = self.run
        if run.step < run.total_steps:
            run.reporter.withdraw_summary()
        run.reporter.open(run.step)
        told = {"ends": environment.ends(), "ranks": run.world.size, "elastic": run.world.elastic is not None}
        run.reporter.begin_session(environment.starts(), **told)


def batches_of(work: Work, world: World, first_step: int) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of each step after `first_step`."""
    batches = training_batches(
        work.dataset.train,
        work.transforms,
        Sampler(work.plan.examples, work.plan.global_batch_size, work.settings.seed, work.sharding),
        first_step=first_step,
        last_step=work.plan.total_steps,
        device=world.device if "GPU" in world.device else "",
    )
    elements = iter(batches)
    while step := list(islice(elements, work.sharding.micro_batches)):
        yield step
