"""From settings to what a run trains: data set, recipe, batch arithmetic, net, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from hvd_cifar import config, fields, models
from hvd_cifar.config import TrainSettings
from hvd_cifar.data import augment, synthetic
from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import MicroBatch, training_batches
from hvd_cifar.data.sampler import Sampler, spread
from hvd_cifar.distributed import DistributedOptimizer, collectives, convert_sync_batch_norm
from hvd_cifar.distributed.batch_norm import local_layers, synchronised_layers
from hvd_cifar.distributed.optimizer import reduction_of
from hvd_cifar.distributed.reduction import sent_bytes
from hvd_cifar.errors import UserError, cause_of
from hvd_cifar.models import Model, Net
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import Lookahead, MovingAverage
from hvd_cifar.optim.schedules import ImageSizes
from hvd_cifar.runtime.world import World
from hvd_cifar.training import user_code
from hvd_cifar.training.callbacks import Callback
from hvd_cifar.training.plan import Plan, changed, global_batch, plan, resolve, set_precision
from hvd_cifar.training.shrink import scaled_width
from hvd_cifar.training.sources import prepare_data
from hvd_cifar.training.step import StepSpec

# Gradients leave in about as many buckets: the last one cannot be hidden, and each costs a message.
BUCKETS, LEAST_BUCKET = 16, 2**16  # bytes
ADAPTING_PIXELS = 5000 * 32 * 32  # of the images that layers learn from before training; 5,000 as in Jordan 2024


@dataclass(frozen=True)
class UserObjects:
    """Objects that a Python program passes instead of names. None: the settings name the object."""

    model: Callable[..., Any] | None = None
    dataset: Dataset | Callable[[], Dataset] | None = None
    callbacks: Sequence[Callback] = ()


@dataclass(frozen=True)
class Work:
    """A run's model, data and settings; the same on all ranks, except for `sampler`."""

    settings: TrainSettings  # resolved, with a precision
    dataset: Dataset  # training, validation and test examples
    model: Model  # with its recipe
    transforms: Transforms  # from the data set's images to what the net sees
    plan: Plan  # the batch arithmetic
    sampler: Sampler  # which micro-batches of each global batch are this rank's

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """Heights of images to train on, in turn."""
        height = self.transforms.shape[0]
        return tuple(max(1, round(scale * height)) for scale in self.recipe.image_scales or (1.0,))

    @property
    def sizes(self) -> ImageSizes:
        """The height of each step's images."""
        return ImageSizes(self.image_sizes, self.plan.all_steps)

    def batches(self, world: World, first_step: int) -> Iterator[tuple[MicroBatch, ...]]:
        """This rank's micro-batches of each step after `first_step`."""
        steps = {"first_step": first_step, "last_step": self.plan.total_steps}
        device = world.device if "GPU" in world.device else ""
        batches = training_batches(self.dataset.train, self.transforms, self.sampler, **steps, device=device)
        return zip(*[batches] * self.sampler.micro_batches, strict=True)

    @property
    def recipe(self) -> Recipe:
        """The model's."""
        return recipe_of(self.model)


def recipe_of(model: Model) -> Recipe:
    """The recipe of a model after `models.with_recipe`."""
    assert model.recipe is not None, "it was asked for"
    return model.recipe


def load_data(settings: TrainSettings, world: World, own: Dataset | Callable[[], Dataset] | None) -> Dataset:
    """The data set that the settings name, or the user's `own`, with validation examples held out. A collective."""
    if own is None and fields.is_user_code(settings.dataset):
        own = user_code.load(settings.dataset, "--dataset")
    dataset = prepare_data(settings, world, own)
    return dataset.hold_out(settings.hold_out, settings.seed) if settings.hold_out else dataset


def prepare(settings: TrainSettings, world: World, given: UserObjects | None = None) -> Work:
    """Load data set and model, and do the batch arithmetic. A collective.

    UserError, the same on every rank, where data set, model and settings do not fit.
    """
    given = given or UserObjects()
    dataset = load_data(settings, world, given.dataset)
    if dataset.classes < 2:
        raise UserError(
            f"data set {dataset.name}: all its examples are of class {dataset.labels_in_words[0]}: give two or more"
        )
    set_precision("float32", settings.seed)
    model = model_of(settings, given)
    model = collectives.host_by_host(lambda: models.with_recipe(model, dataset.image_shape, dataset.classes))
    batch = global_batch(settings, recipe_of(model).batch, world.batch_ranks or world.size)
    recipe = changed(recipe_of(model).for_batch(batch), settings)
    if given.dataset is None and settings.dataset == "auto" and dataset.name == synthetic.LAYOUT.name:
        recipe = replace(recipe, epochs=min(recipe.epochs, recipe.embedded_epochs))
    resolved = for_machines(resolve(settings, recipe), world)
    return work_of(resolved, dataset, replace(model, recipe=recipe), world.rank, world.size, world.batch_ranks)


def work_of(
    settings: TrainSettings, dataset: Dataset, model: Model, rank: int, size: int, batch_ranks: int | None = None
) -> Work:
    """The `Work` of resolved settings; `batch_ranks` as for `plan`. UserError where batch or transforms do not fit."""
    transforms = transforms_of(settings, recipe_of(model), dataset)
    batch_plan = plan(settings, recipe_of(model), len(dataset.train), size, batch_ranks)
    parts = settings.gradient_accumulation, settings.virtual_shards
    sampler = Sampler(batch_plan.examples, batch_plan.global_batch_size, settings.seed, rank, size, *parts)
    return Work(settings, dataset, model, transforms, batch_plan, sampler)


def model_of(settings: TrainSettings, given: UserObjects) -> Model:
    """The model that the settings name, or the user's own. A collective."""
    if given.model is None and settings.model in models.BUILT_IN:
        return models.BUILT_IN[settings.model]
    return Model(settings.model, given.model or user_code.load(settings.model, "--model"))


def transforms_of(settings: TrainSettings, recipe: Recipe, dataset: Dataset) -> Transforms:
    """The transforms of a recipe, which names built-in ones or holds its own. UserError where it does neither."""
    named = recipe.augmentation
    try:
        transforms = augment.transforms(named, dataset) if isinstance(named, str) else named
    except ValueError as failure:
        raise UserError(f"--model {settings.model}: {failure}; change its recipe") from failure
    if not isinstance(transforms, Transforms):
        kind = type(transforms).__name__
        raise UserError(f"--model {settings.model}: augmentation of its recipe is a {kind}; give a name or Transforms")
    return transforms


def for_machines(settings: TrainSettings, world: World) -> TrainSettings:
    """Settings with a precision, the one that all ranks' devices are fast in if none is given, and with --overlap."""
    everywhere = {facts.precision for facts in world.ranks}
    precision = settings.precision or (everywhere.pop() if len(everywhere) == 1 else "float32")
    overlap = settings.overlap
    if overlap == "auto":
        # Within a host the cores that compute also move the bytes. A loss scale looks at all gradients first.
        several = settings.gradient_accumulation > 1 or settings.virtual_shards or precision == "mixed_float16"
        between_hosts = world.local_size < world.size
        overlap = "on" if settings.bucket_bytes or (between_hosts and not several) else "off"
    return settings.model_copy(update={"precision": precision, "overlap": overlap})


def make_net(work: Work) -> Net:
    """The net, freshly initialised and adapted to the training images, with local or synchronised batch norm.

    UserError where the net and a setting exclude each other.
    """
    set_precision(work.settings.precision, work.settings.seed)
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
    """UserError where the net cannot take images of all sizes."""
    height, width, channels = work.transforms.shape
    sizes = sorted({side for side in work.image_sizes if side != height})
    for side in sizes:
        try:
            net.model(keras.Input((side, scaled_width(side, height, width), channels)))
        except Exception as failure:
            raise UserError(
                f"image_scales: the net {work.model.name} cannot take images of {side} pixels ({cause_of(failure)}); "
                "give larger scales, or --set image_scales=1"
            ) from failure


def _refuse_layers(settings: TrainSettings, net: Net) -> None:
    """UserError where the net's own layers contradict an option, or what ranks do."""
    synchronised, drawing, norms = synchronised_layers(net.model), random_layers(net.model), local_layers(net.model)
    renormalised = [layer for layer in norms if getattr(layer, "renorm", False)]
    spectral = [one for one in net.model._flatten_layers() if isinstance(one, keras.layers.SpectralNormalization)]
    of_distribute = [layer for layer in norms if getattr(layer, "synchronized", False)]
    for option, layers, why, remedy in (
        ("virtual_shards", synchronised, "its statistics are over all ranks", "take BatchNormalization"),
        ("virtual_shards", drawing, "its random numbers depend on the number of ranks", "take it out"),
        ("virtual_shards", spectral, "each forward pass changes its weights", "take it out"),
        ("sync_batch_norm", renormalised, "renorm=True cannot be synchronised", "set renorm=False"),
        ("model", of_distribute, "synchronized=True means tf.distribute", "give --sync-batch-norm instead"),
    ):
        if layers and getattr(settings, option):
            name = f"{layers[0].name} ({type(layers[0]).__name__})"
            leave = "" if option == "model" else "leave the option out, or "
            raise UserError(f"{config.option_name(option)}: the net has the layer {name}: {why}; {leave}{remedy}")


def random_layers(model: keras.Model) -> list[Any]:
    """The layers of a model, and the model itself, that draw random numbers in training: dropout, noise, random flips.

    Keras's recurrent layers always hold a generator, and draw only with dropout.
    """

    def never_drops(layer: Any) -> bool:
        return getattr(layer, "dropout", None) == 0 and getattr(layer, "recurrent_dropout", None) == 0

    return [layer for layer in model._flatten_layers() if layer._seed_generators and not never_drops(layer)]


def make_averages(recipe: Recipe, net: Net, steps: int) -> dict[str, Any]:
    """The averages of a net's weights that its recipe keeps, by the names of their parts of the state."""
    weights = net.model.trainable_variables
    made: dict[str, Any] = {"lookahead": Lookahead(weights, steps)} if recipe.lookahead else {}
    return made | ({"averages": MovingAverage(weights, recipe.ema_decay)} if recipe.ema_decay else {})


def bucket_bytes_of(work: Work, model: keras.Model) -> int | None:
    """Bytes of a bucket of gradients; None: they leave in one message."""
    settings = work.settings
    if settings.overlap == "off" or settings.bucket_bytes:
        return settings.bucket_bytes
    total = sum(sent_bytes(v, settings.compression) for v in model.trainable_variables)
    return max(LEAST_BUCKET, total // BUCKETS)


def make_optimizer(work: Work, net: Net, learning_rate: float, process_set: Any = collectives.ALL_RANKS) -> Any:
    """The recipe's optimizer, distributed over a process set, and built. UserError where its function fails."""
    learning_rate = learning_rate or work.settings.learning_rate or 0.0  # a warm-up may begin at 0, which would fit any
    with user_code.errors_of(f"--model {work.model.name}: optimizer({learning_rate:g}) of its recipe"):
        plain = work.recipe.optimizer(learning_rate)
        _refuse_optimizer(plain, learning_rate, work.settings.clip_norm)
    if work.settings.clip_norm is not None:
        plain.global_clipnorm = work.settings.clip_norm
    # Horovod: "sum", since each rank's loss is its share of the global batch's mean; see step.py.
    optimizer: Any = DistributedOptimizer(
        plain,
        op="sum",
        compression=work.settings.compression,
        process_set=process_set,
        fixed_order=bool(work.settings.deterministic),
        bucket_bytes=bucket_bytes_of(work, net.model),
    )
    if work.settings.precision == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
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


def step_spec(work: Work, side: int | None = None, flags: int = 0) -> StepSpec:
    """The settings of the step. `side`: height that it resizes images to; `flags`: numbers sent with the loss."""
    return StepSpec(
        image_shape=work.transforms.shape,
        weight_decay=work.recipe.weight_decay,
        label_smoothing=work.recipe.label_smoothing,
        micro_batches=work.sampler.micro_batches,
        virtual_shards=work.settings.virtual_shards,
        side=side,
        flags=flags,
    )
