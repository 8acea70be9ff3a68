"""From settings to a run that is ready for its first step."""

from __future__ import annotations

import math
from typing import Any

import keras

from hvd_cifar.config import TrainSettings
from hvd_cifar.data.augment import Views
from hvd_cifar.data.dataset import digest_of, load
from hvd_cifar.data.pipeline import in_steps, training_batches
from hvd_cifar.data.sampler import Deal
from hvd_cifar.distributed import DistributedOptimizer, SyncBatchNormalization, collectives, prove_averaging
from hvd_cifar.kernels import compiled
from hvd_cifar.models import Net, build
from hvd_cifar.models.normalization import FusedBatchNormalization
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.optim.schedules import Schedule, linear_scaling
from hvd_cifar.reporting import provenance, terminal
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.world import World, native_precision, versions
from hvd_cifar.training import run_dir
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.evaluate import make_evaluator
from hvd_cifar.training.image_sizes import ImageSizes
from hvd_cifar.training.recipe import RECIPES, Plan, plan, precision_of, set_precision
from hvd_cifar.training.run import Run
from hvd_cifar.training.sources import prepare_data, views_of
from hvd_cifar.training.step import make_train_step

PREPARING_IMAGES = 5000  # as many as Jordan 2024 whitens with
EVALUATION_BATCH = 500  # examples a rank evaluates at a time: enough to be fast, small enough for any device


def assemble(settings: TrainSettings, world: World) -> Run:
    """Everything before the first step, in the order in which it can fail."""
    settings = for_machines(collectives.on_root(lambda: run_dir.continue_run(settings)), world)
    prepared = prepare_data(settings, world)
    train_set, test_set = collectives.on_every_rank(lambda: load(prepared))
    batch_plan = plan(settings, len(train_set.labels), world.size)
    deal = Deal(world.rank, world.size, settings.gradient_accumulation, settings.virtual_shards)

    set_precision(precision_of(settings), settings.seed)
    views = views_of(settings.model, settings.augmentation)
    net = make_net(settings, views)
    net.prepare(views.test(train_set.images[:PREPARING_IMAGES]))

    schedule = make_schedule(settings, batch_plan)
    optimizer = make_optimizer(settings, net, schedule(0))
    weights = net.model.trainable_variables
    averages = MovingAverage(weights, settings.ema_decay) if settings.ema_decay else None
    lookahead = Lookahead(weights, batch_plan.all_steps) if settings.lookahead else None
    origin = (settings.seed, batch_plan.global_batch_size, len(train_set.labels))
    state = State(net, optimizer, averages, origin, lookahead)
    sizes = ImageSizes(settings.image_sizes or (views.side,), batch_plan.all_steps)

    proof = prove_averaging(lambda plain: distribute(settings, plain), contributions="sum")
    facts = {
        "dataset": prepared.name,
        "global_batch_size": batch_plan.global_batch_size,
        "examples_sha256": collectives.on_root(lambda: digest_of(train_set)),
        "learning_rate_schedule": schedule.exact,
    }
    folder, newest = collectives.on_root(lambda: run_dir.claim(settings, run_dir.course_of(settings, facts)))
    checkpoints = Checkpoints(folder / "checkpoints", state) if world.is_root else None
    if newest is not None:
        collectives.on_root(lambda: checkpoints.restore(newest) if checkpoints else None)
    collectives.broadcast_variables(state.variables)
    first_step = int(state.step.numpy())
    is_own = newest is not None and newest.parent == folder / "checkpoints"

    run_facts = {
        **facts,
        "first_step": first_step,
        "world_size": world.size,
        "hosts": collectives.all_gather_object(world.host),
        "local_ranks": collectives.all_gather_object(world.local_rank),
        "device": world.device,
        "threads": world.threads,
        "convolutions": "TensorFlow's" if "GPU" in world.device else compiled.about(),
        "controller": world.controller,
        "algorithm": world.algorithm,
        "transport": world.transport,
        "command": provenance.command(),
        "git_commit": provenance.git_commit() if world.is_root else None,
        "versions": versions(),
    }
    # The data set by its name, not "auto": a later evaluation must not find another one.
    named = settings.model_copy(update={"dataset": prepared.name})
    collectives.on_root(lambda: run_dir.record(folder, named, batch_plan, run_facts))
    reporter = Reporter(folder if world.is_root else None, terminal.is_watched(), prepared.name)
    resumed = [f"resumed from {newest} at step {first_step}"] if newest is not None else []
    described = _describe(settings, world, batch_plan, prepared.name, net)
    for line in (*described, f"start-up proof: {proof}", f"run directory {folder}", *resumed):
        reporter.say(line)

    batches = training_batches(
        train_set,
        views,
        seed=settings.seed,
        global_batch_size=batch_plan.global_batch_size,
        deal=deal,
        first_step=first_step,
        last_step=batch_plan.total_steps,
        device=world.device if "GPU" in world.device else "",
    )
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
        image_sizes=sizes,
        train_steps={
            side: make_train_step(
                net,
                optimizer,
                weight_decay=settings.weight_decay or 0.0,
                label_smoothing=settings.label_smoothing or 0.0,
                slices=deal.slices,
                virtual_shards=settings.virtual_shards,
                averages=averages,
                lookahead=lookahead,
                shrunk_to=side,
            )
            for side in sizes.sides
        },
        evaluator=make_evaluator(net.model, test_set, views, world, EVALUATION_BATCH, settings.eval_examples),
        batches=in_steps(batches, deal.slices),
        run_dir=folder,
        checkpoints=checkpoints,
        reporter=reporter,
        step_count=first_step,
        saved_step=first_step if is_own else -1,  # another run's checkpoint is not among this one's
    )


def for_machines(settings: TrainSettings, world: World) -> TrainSettings:
    """Settings, the same on all ranks, with the precision that suits every rank's device, where none was chosen.

    A collective.
    """
    if settings.precision is not None:
        return settings
    everywhere = set(collectives.all_gather_object(native_precision(world)))
    return settings.model_copy(update={"precision": everywhere.pop() if len(everywhere) == 1 else "float32"})


def make_net(settings: TrainSettings, views: Views) -> Net:
    """The settings' net, freshly initialised."""
    normalization = SyncBatchNormalization if settings.sync_batch_norm else FusedBatchNormalization
    return build(settings.model, views.side, precision_of(settings), normalization)


def distribute(
    settings: TrainSettings, optimizer: keras.optimizers.Optimizer, process_set: Any = collectives.ALL_RANKS
) -> Any:
    """The optimizer, applying gradients that are summed over the ranks as the settings say."""
    # Horovod: "sum", since every rank feeds its share of the global batch's mean; see training.step.
    return DistributedOptimizer(
        optimizer,
        op="sum",
        compression=settings.compression,
        process_set=process_set,
        fixed_order=bool(settings.deterministic),
    )


def make_optimizer(
    settings: TrainSettings, net: Net, learning_rate: float, process_set: Any = collectives.ALL_RANKS
) -> Any:
    """The optimizer of resolved settings, distributed over a process set, with its slots for the net's variables."""
    recipe = RECIPES[settings.model]
    plain = recipe.optimizer(learning_rate, momentum=recipe.momentum, global_clipnorm=settings.clip_norm)
    optimizer = distribute(settings, plain, process_set)
    if settings.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(net.model.trainable_variables)
    return optimizer


def make_schedule(settings: TrainSettings, batch_plan: Plan) -> Schedule:
    """The learning rate of resolved settings: the recipe's staircase, scaled and warmed up as the batch asks for."""
    assert settings.learning_rate is not None and settings.epochs is not None, "settings are resolved"
    recipe = RECIPES[settings.model]
    # A short run that never came down from its first rate would end on whatever its last step happened to be.
    full = recipe.full_examples or 0
    shrink = min(1.0, settings.epochs * batch_plan.examples / full) if full else 1.0
    scaled = batch_plan.learning_rate_factor > 1
    batch = batch_plan.global_batch_size
    warmup_steps = round(batch_plan.warmup_epochs * batch_plan.steps_per_epoch)
    return Schedule(
        base=settings.learning_rate if scaled or not warmup_steps else 0.0,
        peak=linear_scaling(settings.learning_rate, batch_plan.learning_rate_factor),
        warmup_steps=warmup_steps,
        decay_steps=tuple(int(examples * shrink) // batch for examples in recipe.decay_examples),
        decay=0.1,
        zero_at=batch_plan.all_steps if recipe.falls_to_zero else None,
    )


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
    batch, slices = batch_plan.global_batch_size, settings.gradient_accumulation
    parts = f"{world.size} ranks x {batch / world.size / slices:g}" + f" x {slices} micro-batches" * (slices > 1)
    if settings.virtual_shards:
        parts = f"{settings.virtual_shards} virtual shards, {settings.virtual_shards // world.size} on each rank"
    return [
        f"{settings.model} ({parameters:,} parameters, {settings.precision}) on {data}: {world.describe()}",
        f"global batch {batch} = {parts}; {batch_plan.steps_per_epoch} steps an epoch, {batch_plan.total_steps} in all",
        f"learning rate {schedule}",
    ]
