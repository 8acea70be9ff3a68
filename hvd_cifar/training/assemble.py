"""From settings to a run that is ready for its first step."""

from __future__ import annotations

import itertools
import math
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
from filelock import FileLock, Timeout

from hvd_cifar import config
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.dataset import load
from hvd_cifar.data.pipeline import training_batches
from hvd_cifar.distributed import DistributedOptimizer, World, prove_averaging, sync
from hvd_cifar.distributed.world import versions
from hvd_cifar.errors import UserError
from hvd_cifar.models import Net, build
from hvd_cifar.reporting import terminal
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.training import checkpoint
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.evaluate import make_evaluator
from hvd_cifar.training.recipe import RECIPES, Plan, plan, set_precision
from hvd_cifar.training.run import Run
from hvd_cifar.training.schedule import Schedule, linear_scaling
from hvd_cifar.training.sources import prepare_data, views_of
from hvd_cifar.training.step import MovingAverage, make_train_step

EVALUATION_BATCH = 500  # examples a rank evaluates at a time: enough to be fast, small enough for any device


def assemble(settings: TrainSettings, world: World) -> Run:
    """Everything before the first step, in the order in which it can fail."""
    prepared = prepare_data(settings, world)
    train_set, test_set = sync.on_every_rank(lambda: load(prepared))
    batch_plan = plan(settings, len(train_set.labels), world.size)

    set_precision(settings.precision, settings.seed)
    views = views_of(settings.model)
    net = build(settings.model, views.side, settings.precision)

    def wrap(optimizer: keras.optimizers.Optimizer) -> Any:
        # Horovod: "sum", since every rank feeds its share of the global batch's mean; see training.step.
        return DistributedOptimizer(optimizer, op="sum", compression=settings.compression)

    schedule = make_schedule(settings, batch_plan)
    momentum = RECIPES[settings.model].momentum
    sgd = keras.optimizers.SGD(schedule(0), momentum=momentum, global_clipnorm=settings.clip_norm)
    optimizer = wrap(sgd)
    if settings.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(net.model.trainable_variables)
    averages = MovingAverage(net.model.trainable_variables, settings.ema_decay) if settings.ema_decay else None
    state = State(net, optimizer, averages)

    proof = prove_averaging(wrap, contributions="sum")
    course = {
        "dataset": prepared.name,
        "global_batch_size": batch_plan.global_batch_size,
        "learning_rate_schedule": str(schedule),
    }
    recorded = {**{name: getattr(settings, name) for name in checkpoint.COURSE}, **course}
    run_dir, newest = sync.on_root(lambda: _claim_run_dir(settings, recorded))
    checkpoints = Checkpoints(run_dir / "checkpoints", state) if world.is_root else None
    if newest is not None:
        sync.on_root(lambda: checkpoints.restore(newest) if checkpoints else None)
    sync.broadcast_variables(state.variables)
    first_step = int(state.step.numpy())

    run_facts = {
        **course,
        "world_size": world.size,
        "hosts": sync.gather(world.host),
        "device": world.device,
        "threads_per_rank": world.threads,
        "controller": world.controller,
        "command": sys.argv,
        "versions": versions(),
    }
    # The data set by its name, not "auto": a later evaluation must not find another one.
    written = settings.model_copy(update={"run_dir": run_dir, "dataset": prepared.name})
    sync.on_root(lambda: _write_config(run_dir, written, run_facts))
    reporter = Reporter(run_dir if world.is_root else None, terminal.is_watched(), prepared.name)
    resumed = [f"resumed from {newest} at step {first_step}"] if newest is not None else []
    described = _describe(settings, world, batch_plan, prepared.name, net)
    for line in (*described, f"start-up proof: {proof}", f"run directory {run_dir}", *resumed):
        reporter.say(line)

    return Run(
        settings=settings,
        world=world,
        plan=batch_plan,
        data=prepared.name,
        example_count=len(train_set.labels),
        net=net,
        optimizer=optimizer,
        averages=averages,
        state=state,
        schedule=schedule,
        train_step=make_train_step(
            net,
            optimizer,
            weight_decay=settings.weight_decay or 0.0,
            micro_batches=settings.gradient_accumulation,
            averages=averages,
        ),
        evaluator=make_evaluator(net.model, test_set, views, world, EVALUATION_BATCH),
        batches=training_batches(
            train_set,
            views,
            seed=settings.seed,
            global_batch_size=batch_plan.global_batch_size,
            rank=world.rank,
            size=world.size,
            first_step=first_step,
            last_step=batch_plan.total_steps,
            device=world.device if "GPU" in world.device else "",
        ),
        run_dir=run_dir,
        checkpoints=checkpoints,
        reporter=reporter,
        step_count=first_step,
        saved_step=first_step if newest is not None else -1,
    )


def make_schedule(settings: TrainSettings, batch_plan: Plan) -> Schedule:
    """The learning rate of resolved settings: the recipe's staircase, scaled and warmed up as the batch asks for."""
    assert settings.learning_rate is not None and settings.epochs is not None, "settings are resolved"
    recipe = RECIPES[settings.model]
    # A short run that never came down from its first rate would end on whatever its last step happened to be.
    full = recipe.full_examples or 0
    shrink = min(1.0, settings.epochs * batch_plan.examples / full) if full else 1.0
    scaled = batch_plan.learning_rate_factor > 1
    warmup_epochs = settings.warmup_epochs if settings.warmup_epochs is not None else (1.0 if scaled else 0.0)
    batch = batch_plan.global_batch_size
    warmup_steps = round(warmup_epochs * batch_plan.steps_per_epoch)
    return Schedule(
        base=settings.learning_rate if scaled or not warmup_steps else 0.0,
        peak=linear_scaling(settings.learning_rate, batch_plan.learning_rate_factor),
        warmup_steps=warmup_steps,
        decay_steps=tuple(int(examples * shrink) // batch for examples in recipe.decay_examples),
        decay=0.1,
    )


_held: list[FileLock] = []  # this process's run directory, until it ends


def _claim_run_dir(settings: TrainSettings, recorded: dict[str, Any]) -> tuple[Path, Path | None]:
    """Rank 0 chooses, makes and locks the run directory, and finds what to resume from."""
    run_dir = settings.run_dir or _unused_run_dir(settings.model)
    try:
        (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"--run-dir {run_dir}: another run is writing there; wait for it, or give another one"
        ) from None
    except OSError as failure:
        raise UserError(f"--run-dir {run_dir}: {failure.strerror}; give a folder that can be written") from None
    _held.append(lock)

    own = checkpoint.find(run_dir)
    given = None if settings.resume in ("auto", "never") else _given_checkpoint(settings.resume)
    if given is not None and (own is None or given.parent == own.parent):
        # A checkpoint of another run may start one with another learning rate, but its step counts its batches.
        names = list(recorded) if own is not None else ["model", "precision", "dataset", "global_batch_size"]
        _refuse_differences(given.parent.parent, {name: recorded[name] for name in names})
        return run_dir, given
    if own is None:
        return run_dir, None
    if settings.resume == "never":
        raise UserError(f"--run-dir {run_dir} already has a run; give another one, or --resume auto to go on with it")
    if given is not None and config.read_file(run_dir / "config.json").get("resume") != settings.resume:
        raise UserError(f"--run-dir {run_dir} already has a run; give another one to start from {given}")
    _refuse_differences(run_dir, recorded)
    return run_dir, own


def _given_checkpoint(place: str) -> Path:
    try:
        path = checkpoint.find(config.absolute(Path(place)))
    except ValueError as failure:
        raise UserError(f"--resume {place}: {failure}") from None
    if path is None:
        raise UserError(f"--resume {place}: no checkpoint is there; give auto, never, or a checkpoint's path")
    return path


def _refuse_differences(run_dir: Path, now: dict[str, Any]) -> None:
    """UserError where a run was made with other settings than `now`; a folder without config.json says nothing."""
    path = run_dir / "config.json"
    changed = checkpoint.differences(path, now) if path.exists() else []
    if changed:
        raise UserError(
            f"the run in {run_dir} has other settings ({'; '.join(changed)}): give the same ones, or another --run-dir"
        )


def _unused_run_dir(model: str) -> Path:
    stem = f"{model}-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))  # two runs may start in one second
    return next(path for path in (Path("runs").absolute() / name for name in names) if not path.exists())


def _write_config(run_dir: Path, settings: TrainSettings, facts: dict[str, Any]) -> None:
    path = run_dir / "config.json"
    try:
        config.write_file(path, settings, facts)
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; make room or give another --run-dir") from None


def _describe(
    settings: TrainSettings,
    world: World,
    batch_plan: Plan,
    data: str,
    net: Net,
) -> list[str]:
    """The lines that open a run: who trains what on what, and the batch arithmetic."""
    schedule = make_schedule(settings, batch_plan)
    parameters = sum(math.prod(v.shape) for v in net.model.trainable_variables)
    micro = f" x {settings.gradient_accumulation} micro-batches" if settings.gradient_accumulation > 1 else ""
    per_rank = settings.batch_size or f"{batch_plan.global_batch_size / world.size / settings.gradient_accumulation:g}"
    return [
        f"{settings.model} ({parameters:,} parameters, {settings.precision}) on {data}: {world.describe()}",
        f"global batch {batch_plan.global_batch_size} = {world.size} ranks x {per_rank}{micro}; "
        f"{batch_plan.steps_per_epoch} steps an epoch, {batch_plan.total_steps} in all",
        f"learning rate {schedule}",
    ]
