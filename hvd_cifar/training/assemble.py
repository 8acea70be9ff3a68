"""From settings to a run that is ready for its first step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvd_cifar import __version__, config, models
from hvd_cifar.config import TrainSettings
from hvd_cifar.data import augment, synthetic
from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.cifar import CIFAR10, is_published
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.data.pipeline import MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler, Sharding, spread
from hvd_cifar.distributed import DistributedOptimizer, collectives, convert_sync_batch_norm, prove_averaging
from hvd_cifar.distributed.batch_norm import local_layers, synchronised_layers
from hvd_cifar.distributed.optimizer import reduction_of, set_bucket_bytes, watch_gradients
from hvd_cifar.errors import UserError, cause_of
from hvd_cifar.kernels import compiled
from hvd_cifar.models import Model, Net
from hvd_cifar.models.portable import finish_all
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.optim.schedules import Schedule
from hvd_cifar.reporting import provenance, terminal
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.runtime.watch import Watch
from hvd_cifar.runtime.world import World, native_precision, versions
from hvd_cifar.training import overlap, profile, random_layers, run_dir, unlike, user_code
from hvd_cifar.training.callbacks import (
    Callback,
    Checkpointer,
    ConfusionWriter,
    Evaluator,
    ExampleLedger,
    Logger,
    MovingStatistics,
    ReplicaCheck,
    Summariser,
    Timekeeper,
    check_interface,
)
from hvd_cifar.training.checkpoint import Checkpoints, State
from hvd_cifar.training.evaluate import make_evaluator
from hvd_cifar.training.forecast import Forecast
from hvd_cifar.training.plan import (
    Plan,
    changed,
    global_batch,
    make_schedule,
    plan,
    precision_of,
    resolve,
    set_precision,
)
from hvd_cifar.training.progress import Progress, Run
from hvd_cifar.training.record import Record
from hvd_cifar.training.rollback import Rollback
from hvd_cifar.training.shrink import scaled_width
from hvd_cifar.training.snapshots import Snapshots
from hvd_cifar.training.sources import differences, name_hosts, prepare_data, read_batches
from hvd_cifar.training.state_copy import Copier, StateCopy
from hvd_cifar.training.step import Probes, StepSpec, TrainStep, local_statistics, make_train_step
from hvd_cifar.training.step_times import StepTimes
from hvd_cifar.training.stragglers import Stragglers
from hvd_cifar.training.summaries import Summaries
from hvd_cifar.training.trainer import OfUser, Trainer
from hvd_cifar.training.validation import Beside, Best

ADAPTING_PIXELS = 5000 * 32 * 32  # of the images that layers learn from before training; 5,000 as in Jordan 2024
NOT_PUBLISHED = "note: the training images are not CIFAR-10's published ones: compare only runs on the same files"


@dataclass(frozen=True)
class Work:
    """A run's model, data and settings; the same on all ranks, except for `sharding`.

    Attributes:
        settings: resolved, with a precision.
        dataset: training, validation and test examples.
        model: with its recipe.
        transforms: from the data set's images to what the net sees.
        plan: the batch arithmetic.
        sharding: which micro-batches of each global batch are this rank's.
    """

    settings: TrainSettings
    dataset: Dataset
    model: Model
    transforms: Transforms
    plan: Plan
    sharding: Sharding

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """Heights of images to train on, in turn."""
        height = self.transforms.shape[0]
        return tuple(max(1, round(scale * height)) for scale in self.recipe.image_scales or (1.0,))

    @property
    def sizes(self) -> ImageSizes:
        """The height of each step's images."""
        return ImageSizes(self.image_sizes, self.plan.all_steps)

    @property
    def recipe(self) -> Recipe:
        """The model's."""
        assert self.model.recipe is not None, "it was asked for"
        return self.model.recipe


def prepare(
    settings: TrainSettings,
    world: World,
    given: OfUser | None = None,
    trained_with: int = 0,
    learnt: Dataset | None = None,
) -> Work:
    """Load data set and model, and do the batch arithmetic. A collective.

    Args:
        trained_with: to evaluate a run: its global batch, by which the recipe is chosen.
        learnt: to evaluate a run: its data set, which its net is made for.

    Raises:
        UserError: where data set, model and settings do not fit; the same on every rank.
    """
    given = given or OfUser()
    own = given.dataset
    if own is None and config.is_user_code(settings.dataset):
        own = user_code.load(settings.dataset, "--dataset")
    dataset = prepare_data(settings, world, own)
    if count := settings.hold_out:
        dataset = dataset.hold_out(count, settings.seed)
    set_precision("float32", settings.seed)
    model = _model(settings, given)
    shape, classes = (learnt or dataset).image_shape, (learnt or dataset).classes
    model = collectives.host_by_host(lambda: models.with_recipe(model, shape, classes))
    assert model.recipe is not None, "it was asked for"
    batch = trained_with or global_batch(settings, model.recipe.batch, world.batch_ranks or world.size)
    recipe = changed(model.recipe.for_batch(batch), settings)
    model = replace(model, recipe=recipe)
    if learnt is not None:
        dataset = run_dir.as_learnt(dataset, learnt, any_size=not isinstance(recipe.augmentation, str))
    elif dataset.classes < 2:
        raise UserError(
            f"data set {dataset.name}: all its examples are of class {dataset.labels_in_words[0]}: give two or more"
        )
    if own is None and settings.dataset == "auto" and dataset.name == synthetic.LAYOUT.name:
        recipe = replace(recipe, epochs=min(recipe.epochs, recipe.embedded_epochs))
    resolved = for_machines(resolve(settings, recipe), world)
    if trained_with:  # an evaluation makes no steps: ranks may outnumber the training examples
        return work_of(resolved, dataset, model, 0, 1)
    return work_of(resolved, dataset, model, world.rank, world.size, world.batch_ranks)


def work_of(
    settings: TrainSettings, dataset: Dataset, model: Model, rank: int, size: int, batch_ranks: int | None = None
) -> Work:
    """The `Work` of resolved settings; `batch_ranks` as for `plan`.

    Raises:
        UserError: where batch, transforms or image sizes do not fit; the same on every rank.
    """
    assert model.recipe is not None, "it was asked for"
    transforms = transforms_of(settings, model.recipe, dataset)
    batch_plan = plan(settings, model.recipe, len(dataset.train), size, batch_ranks)
    sharding = Sharding(rank, size, settings.gradient_accumulation, settings.virtual_shards)
    return Work(settings, dataset, model, transforms, batch_plan, sharding)


def _model(settings: TrainSettings, given: OfUser) -> Model:
    if given.model is not None:
        return Model(settings.model, given.model)
    if settings.model in models.BUILT_IN:
        return models.BUILT_IN[settings.model]
    return Model(settings.model, user_code.load(settings.model, "--model"))


def transforms_of(settings: TrainSettings, recipe: Recipe, dataset: Dataset) -> Transforms:
    """The transforms of a recipe, which names built-in ones or holds its own.

    Raises:
        UserError: where no transforms have the name, or it holds something else.
    """
    named = recipe.augmentation
    try:
        transforms = augment.transforms(named, dataset) if isinstance(named, str) else named
    except ValueError as failure:
        raise UserError(f"--model {settings.model}: {failure}; change its recipe") from failure
    if not isinstance(transforms, Transforms):
        kind = type(transforms).__name__
        raise UserError(f"--model {settings.model}: augmentation of its recipe is a {kind}; give a name or Transforms")
    return augment.undistorted(transforms) if settings.set.augmentation == "none" else transforms


@dataclass(frozen=True)
class Learner:
    """The net, its optimizer, and all of their state.

    Attributes:
        net: with its model.
        optimizer: distributed, and built for the net's variables.
        averages: moving averages of the weights for evaluation, or None.
        lookahead: slow weights, or None.
        state: all that a checkpoint holds.
    """

    net: Net
    optimizer: Any
    averages: MovingAverage | None
    lookahead: Lookahead | None
    state: State


def assemble(settings: TrainSettings, world: World, given: OfUser, watch: Watch | None = None) -> Trainer:
    """Make everything that a run needs before its first step. A collective.

    The run directory stays locked until `run_dir.release`, also after an error.
    """
    settings = collectives.on_root(lambda: run_dir.continue_run(settings))
    work = prepare(settings, world, given)
    if work.settings.deterministic:
        world = replace(world, algorithm="all-to-all and all-gather")
    profile.check_steps(work.settings.profile_steps, work.plan.total_steps)
    kernels = _agree_on_kernels(world, work.settings)
    schedule = make_schedule(work.settings, work.recipe, work.plan)
    learner = collectives.on_every_rank(lambda: make_learner(work, schedule(0)))
    examples = -(-work.plan.global_batch_size // (world.size * work.sharding.micro_batches))
    spec = step_spec(work)
    overlap_lines = overlap.set_buckets(work.settings, world, learner.net, learner.optimizer, spec, examples)
    from_root, unlike_lines = unlike.taken_from_root(work.settings, world, learner.net, learner.optimizer)
    proof = prove_averaging(
        lambda plain: with_buckets_of(learner.optimizer, distribute(work, plain)), contributions="sum"
    )
    own_callbacks = given.callbacks or [_callback(spec) for spec in work.settings.callbacks]
    check_interface(own_callbacks)

    published = collectives.on_root(lambda: is_published(work.dataset))
    facts = {
        # The name, not "auto", under which a later evaluation might find another data set.
        "dataset": _name_of_data(work, given),
        "global_batch_size": work.plan.global_batch_size,
        "examples_sha256": collectives.on_root(lambda: work.dataset.train.digest),
        "learning_rate_schedule": collectives.on_every_rank(lambda: schedule.exact),
        "convolutions": kernels,
    }
    facts |= run_dir.numbers_of(work.settings, work.recipe)
    course = run_dir.course_of(work.settings, facts)
    folder, newest = collectives.on_root(lambda: run_dir.claim(work.settings, course))
    begin = _restore(work, world, learner, folder, newest)
    notes = [
        *([NOT_PUBLISHED] if published is False else []),
        *overlap_lines,
        *unlike_lines,
        f"start-up proof: {proof}",
        f"run directory {folder}",
    ]
    if newest is not None:
        notes += collectives.on_root(lambda: run_dir.changed_kernels(newest.parent.parent, kernels))
    notes += [f"resumed from {begin.source} at step {begin.step}"] if begin.source else []
    named = work.settings.model_copy(update={"dataset": facts["dataset"]})
    data = run_dir.describe(work.dataset)
    run_facts = {**facts, "data": data, "published_images": published, "first_step": begin.step, **_facts_of(world)}
    run_facts |= {name: getattr(work.plan, name) for name in ("total_steps", "all_steps", "steps_per_epoch")}
    run_facts |= {"image_heights": work.image_sizes}
    collectives.on_root(lambda: run_dir.record(folder, named, work.plan, run_facts))

    own_folder = folder if world.is_root else None
    reporter = Reporter(own_folder, terminal.is_watched(), work.dataset.name, work.settings.quiet)
    for line in (*_describe(work, world, learner, schedule), *notes):
        reporter.say(line)
    stops, skips = bool(world.elastic and world.elastic.saves_only), work.settings.on_nan == "skip"
    progress = Progress(begin.step, begin.saved_step, watch, stops=stops, skips=skips, at_once=begin.copy is not None)
    progress.skipped_before = int(learner.state.skipped.numpy())
    progress.rollbacks = int(learner.state.rollbacks.numpy())
    progress.rate_factor = float(learner.state.rate_factor.numpy())
    progress.watch.run_dir = folder
    results: dict[str, Any] = {}
    model, name = learner.net.model, work.dataset.name
    run = Run(work.settings, world, work.plan, work.recipe, schedule, model, name, folder, progress, results)
    times = StepTimes()
    progress.watch.waits_in_step = times.is_waiting
    record = None if work.settings.summary_every == 0 else Record(model)
    if record:
        watch_gradients(learner.optimizer, record.keep_gradients)
    step = _step_of(work, learner, schedule, Probes(times, record), from_root)
    trainer = Trainer(run, progress, step, lambda first: times.each(_batches(work, world, first)), reporter, work.sizes)
    summaries = Summaries(progress, record, work.dataset, reporter)
    stragglers = Stragglers(progress, times, reporter)
    ours = _callbacks_of(trainer, work, learner, begin, results)
    profiled = work.settings.profile_steps
    profilers = [profile.Profiler(progress, profiled, reporter)] if profiled else []
    trainer.callbacks = [summaries, *ours, stragglers, *profilers, *own_callbacks]
    return trainer


@dataclass(frozen=True)
class Beginning:
    """Where a run begins, and what keeps its state.

    Attributes:
        step: finished global steps.
        source: path of the checkpoint that the state is from, or "memory"; "": the run is new.
        saved_step: of this run's newest checkpoint, not another run's; -1: none.
        checkpoints: None on ranks other than 0.
        copy: None unless the job is elastic.
    """

    step: int
    source: str
    saved_step: int
    checkpoints: Checkpoints | None
    copy: StateCopy | None


def _restore(work: Work, world: World, learner: Learner, folder: Path, newest: Path | None) -> Beginning:
    """Give all ranks the newest state, from a checkpoint or an elastic job's copies in memory. A collective."""
    state, job = learner.state, world.elastic
    checkpoints = Checkpoints(folder / "checkpoints", state) if world.is_root else None
    if newest is not None:
        collectives.on_root(lambda: checkpoints.restore(newest) if checkpoints else None)
    collectives.broadcast_variables(state.variables)
    on_disk = int(state.step.numpy())
    copy = StateCopy(job.name, state, own_variables(work, learner), world) if job else None
    in_memory = copy.restore(on_disk) if copy else None
    finish_all(learner.net.model)
    random_layers.separate(learner.net.model, world.rank)
    saved_step = on_disk if newest is not None and newest.parent == folder / "checkpoints" else -1
    source = str(newest or "") if in_memory is None else "memory"
    return Beginning(int(state.step.numpy()), source, saved_step, checkpoints, copy)


def _name_of_data(work: Work, given: OfUser) -> str:
    """The data set's name for the run's record. An object's name gets a prefix, so that it names no built-in set."""
    if isinstance(given.dataset, Dataset):
        return config.OBJECT_DATASET + work.dataset.name
    return work.dataset.name if work.settings.dataset == "auto" else work.settings.dataset


def make_learner(work: Work, learning_rate: float) -> Learner:
    """Net, optimizer and averages, freshly initialised. Raises UserError where the net and the settings do not fit."""
    settings, net = work.settings, make_net(work)
    for layer in local_layers(net.model):
        if getattr(layer, "synchronized", False):
            raise UserError(
                f"--model {work.model.name}: its layer {layer.name} has synchronized=True, which means tf.distribute; "
                "give --sync-batch-norm, or take it out"
            )
    weights = net.model.trainable_variables
    optimizer = make_optimizer(work, net, learning_rate)
    recipe = work.recipe
    averages = MovingAverage(weights, recipe.ema_decay) if recipe.ema_decay else None
    lookahead = Lookahead(weights, work.plan.all_steps) if recipe.lookahead else None
    origin = (settings.seed, work.plan.global_batch_size, work.plan.examples)
    return Learner(net, optimizer, averages, lookahead, State(net, optimizer, averages, origin, lookahead))


def for_machines(settings: TrainSettings, world: World) -> TrainSettings:
    """Settings with a precision: if none is given, the one that all ranks' devices are fast in. A collective."""
    if settings.precision is not None:
        return settings
    everywhere = set(collectives.all_gather_object(native_precision(world)))
    return settings.model_copy(update={"precision": everywhere.pop() if len(everywhere) == 1 else "float32"})


def make_net(work: Work) -> Net:
    """The net, freshly initialised and adapted to the training images, with local or synchronised batch norm.

    Raises:
        UserError: where the net and a setting exclude each other.
    """
    set_precision(precision_of(work.settings), work.settings.seed)
    net = models.build(work.model, work.transforms.shape, work.dataset.classes)
    _refuse_sizes(work, net)
    _refuse_layers(work.settings, net)
    if work.settings.sync_batch_norm:
        convert_sync_batch_norm(net.model)
    height, width, _ = work.transforms.shape
    chosen = spread(max(1, ADAPTING_PIXELS // (height * width)), len(work.dataset.train))
    models.adapt(net, lambda: work.transforms.test(work.dataset.train.images[chosen]))
    return net


def _refuse_sizes(work: Work, net: Net) -> None:
    """UserError where the net cannot take images of all sizes, or there are no six views of an image."""
    height, width, channels = work.transforms.shape
    if work.recipe.test_time_augmentation and min(height, width) < 2:
        raise UserError(
            f"test_time_augmentation: images of {height} x {width} pixels have no views; "
            "give --set test_time_augmentation=false"
        )
    sizes = sorted({side for side in work.image_sizes if side != height})
    if sizes and (getattr(net.model, "input_shape", None) or (None, None))[1] is not None:
        raise UserError("image_scales: this net takes images of one size; give --set image_scales=1")
    for side in sizes:
        try:
            net.model(keras.Input((side, scaled_width(side, height, width), channels)))
        except Exception as failure:
            raise UserError(
                f"image_scales: the net {work.model.name} cannot take images of {side} pixels ({cause_of(failure)}); "
                "give larger scales, or --set image_scales=1"
            ) from failure


def _refuse_layers(settings: TrainSettings, net: Net) -> None:
    """UserError where the net's own layers contradict an option."""
    over_all, local = "its statistics are over all ranks", "take keras.layers.BatchNormalization"
    synchronised, drawing = synchronised_layers(net.model), random_layers.random_layers(net.model)
    renormalised = [layer for layer in local_layers(net.model) if getattr(layer, "renorm", False)]
    spectral = [one for one in net.model._flatten_layers() if isinstance(one, keras.layers.SpectralNormalization)]
    for option, layers, why, remedy in (
        ("virtual_shards", synchronised, f"{over_all}, and each virtual shard has its own", local),
        ("virtual_shards", drawing, "it draws random numbers, which depend on the number of ranks", "take it out"),
        ("virtual_shards", spectral, "each forward pass changes its weights", "take it out"),
        ("sync_batch_norm", renormalised, "renorm=True cannot be synchronised", "set renorm=False"),
    ):
        if layers and getattr(settings, option):
            name = f"{layers[0].name} ({type(layers[0]).__name__})"
            given = config.option_name(option)
            raise UserError(f"{given}: the net has the layer {name}: {why}; leave the option out, or {remedy}")
    for variable in net.model.trainable_variables:
        if variable.overwrite_with_gradient:
            raise UserError(
                f"--model {settings.model}: {variable.path} takes its value from its gradient, which ranks add up; "
                'leave quantize("float8") out'
            )


def distribute(work: Work, optimizer: keras.optimizers.Optimizer, process_set: Any = collectives.ALL_RANKS) -> Any:
    """The optimizer, which sums gradients over the ranks with the compression and order of the settings."""
    settings = work.settings
    # Horovod: "sum", since each rank's loss is its share of the global batch's mean; see training.step.
    distributed = DistributedOptimizer(
        optimizer,
        op="sum",
        compression=settings.compression,
        process_set=process_set,
        fixed_order=bool(settings.deterministic),
    )
    return keras.optimizers.LossScaleOptimizer(distributed) if settings.precision == "mixed_float16" else distributed


def with_buckets_of(optimizer: Any, other: Any) -> Any:
    """`other`, with the buckets of `optimizer`. An optimizer that is not distributed is left to the start-up proof."""
    reduction = reduction_of(optimizer)
    if reduction is not None and reduction_of(other) is not None:
        set_bucket_bytes(other, reduction.bucket_bytes)
    return other


def make_optimizer(work: Work, net: Net, learning_rate: float, process_set: Any = collectives.ALL_RANKS) -> Any:
    """The recipe's optimizer, distributed over a process set and built for the net's variables.

    Raises:
        UserError: where the recipe's function fails.
    """
    learning_rate = learning_rate or work.settings.learning_rate or 0.0  # a warm-up may begin at 0, which would fit any
    with user_code.errors_of(f"--model {work.model.name}: optimizer({learning_rate:g}) of its recipe"):
        plain = work.recipe.optimizer(learning_rate)
        _refuse_optimizer(plain, learning_rate, work.settings.clip_norm)
    if work.settings.clip_norm is not None:
        plain.global_clipnorm = work.settings.clip_norm
    optimizer = distribute(work, plain, process_set)
    optimizer.build(net.model.trainable_variables)
    return optimizer


def _refuse_optimizer(plain: Any, learning_rate: float, clip_norm: float | None) -> None:
    """TypeError or ValueError where a step would fail with a recipe's optimizer, or ignore one of its settings."""
    wrappers = (keras.optimizers.LossScaleOptimizer, keras.optimizers.MultiOptimizer)
    if not isinstance(plain, keras.optimizers.Optimizer):
        raise TypeError(f"returned {type(plain).__name__}; return a keras.optimizers.Optimizer")
    if isinstance(plain, wrappers) or reduction_of(plain) is not None:
        raise TypeError(f"returned {type(plain).__name__} around others; return one plain optimizer")
    if not isinstance(plain._learning_rate, keras.Variable):
        raise TypeError("its learning rate is no number; return Optimizer(rate), and give the recipe a schedule")
    if not np.isclose(own := float(plain.learning_rate), learning_rate, rtol=1e-5, atol=0):
        raise ValueError(
            f"its learning rate is {own:g}, and each step sets the recipe's; return Optimizer(rate) with the rate that "
            "it is given, and set the recipe's learning_rate"
        )
    if plain.use_ema:
        raise ValueError("use_ema has no effect here; leave it out, and give the recipe ema_decay")
    if clip_norm is not None and (plain.clipnorm is not None or plain.clipvalue is not None):
        raise ValueError("it has clipnorm or clipvalue, and --clip-norm is given; leave one out")


def step_spec(work: Work, side: int | None = None) -> StepSpec:
    """The settings of the step; `side`: height that it resizes images to."""
    settings = work.settings
    return StepSpec(
        image_shape=work.transforms.shape,
        weight_decay=work.recipe.weight_decay,
        label_smoothing=work.recipe.label_smoothing,
        micro_batches=work.sharding.micro_batches,
        virtual_shards=settings.virtual_shards,
        side=side,
        skips=settings.on_nan == "skip",
    )


def _step_of(work: Work, learner: Learner, schedule: Schedule, probes: Probes, from_root: Sequence[Any]) -> TrainStep:
    averages = [kept for kept in (learner.lookahead, learner.averages) if kept]
    return TrainStep(
        lambda side: make_train_step(
            learner.net, learner.optimizer, step_spec(work, side), averages, probes, from_root
        ),
        work.sizes,
        schedule,
        work.plan,
    )


def _batches(work: Work, world: World, first_step: int) -> Iterator[list[MicroBatch]]:
    """This rank's micro-batches of each step."""
    batches = training_batches(
        work.dataset.train,
        work.transforms,
        Sampler(work.plan.examples, work.plan.global_batch_size, work.settings.seed, work.sharding),
        first_step=first_step,
        last_step=work.plan.total_steps,
        device=world.device if "GPU" in world.device else "",
    )
    elements = iter(batches)
    while step := list(read_batches(islice(elements, work.sharding.micro_batches))):
        yield step


def _callbacks_of(
    trainer: Trainer, work: Work, learner: Learner, begin: Beginning, results: dict[str, Any]
) -> list[Callback]:
    """The callbacks of this program, in the order in which they are called."""
    run, progress, reporter, tell = trainer.run, trainer.progress, trainer.reporter, trainer.tell
    settings, checkpoints, copy = work.settings, begin.checkpoints, begin.copy
    parts = {
        part: make_evaluator(learner.net.model, work.dataset, work.transforms, run.world, None, part)
        for part in ("test", "validation")
        if getattr(work.dataset, part)
    }
    statistics = MovingStatistics(own_variables(work, learner), progress.saved_step)
    logger = Logger(progress, reporter, tell)
    shorter = work.recipe.shorter if work.dataset.name == CIFAR10.name else {}
    forecast = Forecast(logger, reporter, work.sizes, shorter)
    replicas = ReplicaCheck(progress, learner.state, statistics, reporter)
    evaluator = Evaluator(progress, parts, statistics, learner.averages, reporter, tell)
    confusions = ConfusionWriter(work.dataset, reporter)
    checkpointer = Checkpointer(progress, learner.state, checkpoints, statistics, reporter, tell)
    ledger = [ExampleLedger(progress, reporter, at_once=copy is not None)] if settings.record_examples else []
    # After ledger and logger, so that each step in the copy is on record. Before the slow callbacks, to lose less.
    copier = [Copier(copy, checkpointer)] if copy else []
    summariser = Summariser(logger, replicas, evaluator, checkpointer, results)
    if settings.on_nan == "rollback":
        trainer.go_back = Rollback(trainer, learner.state, checkpoints, statistics)
    timekeeper = Timekeeper(progress, reporter)
    beside: list[Callback] = []
    best: list[Callback] = []
    if run.world.beside or settings.hold_out or settings.early_stopping:
        weights = State(learner.net, None, learner.averages)  # on every rank: a count of variables names collectives
        snapshots = Snapshots(run.run_dir, weights, run.step) if run.world.is_root else None
        best = [Best(progress, snapshots, reporter, evaluator.watched, results)]
        if run.world.beside:
            beside = [Beside(progress, snapshots, statistics, reporter, tell, evaluator.watched)]
    # `Beside` waits for its last results: by then the last step is saved.
    after = [evaluator, confusions, checkpointer, *beside, *best]
    return [*ledger, logger, forecast, *copier, replicas, *after, timekeeper, summariser]


def own_variables(work: Work, learner: Learner) -> list[Any]:
    """Variables that differ between ranks: moving statistics, unless steps average them."""
    return [] if work.settings.virtual_shards else local_statistics(learner.net.model)


def _callback(spec: str) -> Any:
    found = user_code.load(spec, "--callbacks")
    return collectives.on_every_rank(lambda: _made(found, spec)) if isinstance(found, type) else found


def _made(kind: type, spec: str) -> Any:
    with user_code.errors_of(f"--callbacks {spec}, called without arguments"):
        return kind()


def _agree_on_kernels(world: World, settings: TrainSettings) -> str:
    """The convolution kernels of all ranks, in words. A collective.

    Raises:
        UserError: under --virtual-shards, where hosts compute differently.
    """
    hosts, host = name_hosts(world)
    own = "TensorFlow's" if "GPU" in world.device else compiled.about()
    found = dict.fromkeys(collectives.all_gather_object((hosts[host], own)))  # each host once
    named = differences(found)
    if not named:
        return own
    if settings.virtual_shards:
        raise UserError(
            f"--virtual-shards: hosts compute convolutions differently ({named}), so their bits differ; "
            "set up all alike, set HVD_CIFAR_VECTORS to the smallest, or leave the slower hosts out"
        )
    if world.is_root:
        terminal.complain(
            f"hvd_cifar: note: hosts compute convolutions differently, results differ by rounding: {named}"
        )
    return named


def _facts_of(world: World) -> dict[str, Any]:
    """Facts about ranks and versions for the run's record. A collective."""
    hosts, local_ranks = zip(*collectives.all_gather_object((world.host, world.local_rank)), strict=True)
    return {
        "world_size": world.size,
        "hosts": list(hosts),
        "local_ranks": list(local_ranks),
        "device": world.device,
        "threads": world.threads,
        "controller": world.controller,
        "algorithm": world.algorithm,
        "transport": world.transport,
        "command": provenance.command(),
        "hvd_cifar": __version__,
        "git_commit": provenance.git_commit() if world.is_root else None,
        "versions": versions(),
    }


def _describe(work: Work, world: World, learner: Learner, schedule: Schedule) -> list[str]:
    """The first lines of a run: model, data set, ranks, and the batch arithmetic."""
    settings, batch, net = work.settings, work.plan.global_batch_size, learner.net
    optimizer = getattr(learner.optimizer, "inner_optimizer", learner.optimizer)  # a loss scale wraps it
    micro_batches, shards = settings.gradient_accumulation, settings.virtual_shards
    parts = f"{world.size} ranks x {batch / world.size / micro_batches:g}"
    parts += f" x {micro_batches} micro-batches" * (micro_batches > 1)
    if shards:
        parts = f"{shards} virtual shards, {shards // world.size} on each rank"
    alone = local_layers(net.model) and batch < 2 * work.sharding.micro_batches * world.size
    drawing = [layer.name for layer in random_layers.random_layers(net.model)]
    trained = f"{settings.model} ({net.parameters:,} parameters, {settings.precision}) on {work.dataset.name}"
    held = len(work.dataset.validation or ())
    return [
        f"{trained}: {world.describe()}",
        *([f"{held} of {work.plan.examples + held} training examples are held out for evaluation"] if held else []),
        f"global batch {batch} = {parts}; {work.plan.steps_per_epoch} steps an epoch, {work.plan.total_steps} in all",
        f"optimizer {optimizer.name}, learning rate {schedule}",
        *(
            ["note: batch norm takes its statistics over 1 image; give larger batches, or --sync-batch-norm"]
            if alone
            else []
        ),
        *([f"random layers: {', '.join(drawing)}: results depend on the number of ranks"] if drawing else []),
    ]
