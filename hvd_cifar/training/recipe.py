"""What each model is trained with, unless the user says otherwise: the numbers of its paper or tutorial."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import keras

from hvd_cifar.config import DEFAULT_PER_RANK_BATCH_SIZE, Precision, TrainSettings
from hvd_cifar.errors import UserError
from hvd_cifar.optim.muon import Muon


@dataclass(frozen=True)
class Recipe:
    """Defaults of one model; epochs are passes over 50,000 images, the last of which may be a part.

    The learning rate is for a batch of 128, or for `global_batch_size`, where the recipe has one for all ranks.
    """

    learning_rate: float
    momentum: float
    decay_examples: tuple[int, ...]  # the learning rate falls to a tenth when so many have been seen
    full_examples: int | None  # a run over fewer goes through the staircase in proportion; None: it keeps these steps
    weight_decay: float
    ema_decay: float
    epochs: float
    global_batch_size: int | None = None
    falls_to_zero: bool = False  # the learning rate, in a straight line
    label_smoothing: float = 0.0
    lookahead: bool = False
    image_sizes: tuple[int, ...] = ()
    test_time_augmentation: bool = False
    evaluation_epochs: int = 1  # between evaluations
    precision: Literal["float32"] | None = "float32"  # None: as the machine is
    optimizer: Callable[..., keras.optimizers.Optimizer] = keras.optimizers.SGD


def _muon(learning_rate: float, momentum: float, global_clipnorm: float | None) -> keras.optimizers.Optimizer:
    # Rates of what is not a convolution, as fractions of the kernels' rate: a batch norm's offset and the logits.
    others = {"": (FAST_OFFSETS / FAST_RATE, 0.0), "logits": (FAST_LOGITS / FAST_RATE, 0.0)}
    return Muon(learning_rate, momentum, others=others, global_clipnorm=global_clipnorm)


FAST_BATCH = 1024
FAST_RATE = 0.24  # of kernels, whose update does not depend on the size of the gradient
FAST_OFFSETS = 0.053 * FAST_BATCH  # of batch norms' offsets, for the gradient of a mean over the batch
FAST_LOGITS = 0.67 * FAST_BATCH


def _resnet() -> Recipe:
    # He et al. 2015, section 4.2: 0.1, momentum 0.9, a tenth at 32,000 and at 48,000 steps of 128, weight decay 1e-4.
    return Recipe(
        learning_rate=0.1,
        momentum=0.9,
        decay_examples=(32_000 * 128, 48_000 * 128),
        full_examples=64_000 * 128,
        weight_decay=1e-4,
        ema_decay=0.0,
        epochs=164,  # 64,000 steps of 128, as in the paper
    )


RECIPES = {
    # After airbench94 (Jordan 2024) and its record with Muon; see docs/fast.md for what differs, and why.
    "fast": Recipe(
        learning_rate=FAST_RATE,
        momentum=0.6,
        decay_examples=(),
        full_examples=None,
        weight_decay=3e-6,
        ema_decay=0.0,
        epochs=9.9,
        global_batch_size=FAST_BATCH,
        falls_to_zero=True,
        label_smoothing=0.2,
        lookahead=True,
        image_sizes=(24, 32, 32),
        test_time_augmentation=True,
        evaluation_epochs=3,  # one takes a fifteenth of an epoch of whole images, and a greater part of a smaller one
        precision=None,
        optimizer=_muon,
    ),
    # TensorFlow's CIFAR-10 tutorial, cifar10.py and cifar10_multi_gpu_train.py: a tenth every 350 epochs.
    "tutorial": Recipe(
        learning_rate=0.1,
        momentum=0.0,
        decay_examples=(350 * 50_000, 700 * 50_000, 1050 * 50_000),
        full_examples=None,
        weight_decay=0.004,
        ema_decay=0.9999,
        epochs=6,  # a first result within minutes on two cores; the tutorial itself goes on for 150 and more
    ),
    "resnet20": _resnet(),
    "resnet32": _resnet(),
    "resnet56": _resnet(),
}


@dataclass(frozen=True)
class Plan:
    """The batch arithmetic of a run: what is printed at its start, and what its steps follow.

    Attributes:
        examples: in the training set.
        global_batch_size: examples per step over all ranks and micro-batches.
        steps_per_epoch: the ragged last one counted.
        total_steps: at which the run ends.
        all_steps: of all epochs, whether or not --max-steps ends the run earlier.
        learning_rate_factor: of the linear scaling rule; 1 where the global batch is given, unless it is given too.
        warmup_epochs: over which the learning rate rises; it does by default where it is scaled.
    """

    examples: int
    global_batch_size: int
    steps_per_epoch: int
    total_steps: int
    all_steps: int
    learning_rate_factor: int
    warmup_epochs: float


def resolve(settings: TrainSettings) -> TrainSettings:
    """Settings with the recipe's values in place of None, as far as they do not depend on ranks and machines."""
    recipe = RECIPES[settings.model]
    exact = settings.virtual_shards is not None
    defaults = {
        "threads_per_rank": 1 if exact else None,  # how a sum is split over threads moves its last bits
        "epochs": recipe.epochs,
        "learning_rate": recipe.learning_rate,
        "weight_decay": recipe.weight_decay,
        "ema_decay": recipe.ema_decay,
        "label_smoothing": recipe.label_smoothing,
        "lookahead": recipe.lookahead,
        "image_sizes": recipe.image_sizes,
        "test_time_augmentation": recipe.test_time_augmentation,
        "precision": recipe.precision,
    }
    missing = {name: value for name, value in defaults.items() if getattr(settings, name) is None}
    return settings.model_copy(update={**missing, "deterministic": bool(settings.deterministic or exact)})


def plan(settings: TrainSettings, examples: int, size: int) -> Plan:
    """The batch arithmetic of resolved settings for `examples` training examples on `size` ranks.

    Raises:
        UserError: where the global batch leaves a rank, or one of its micro-batches, without an example.
    """
    shards = settings.virtual_shards
    if shards is not None and shards % size:
        fitting = ", ".join(str(2**i) for i in range(shards.bit_length()))
        raise UserError(f"--virtual-shards {shards}: {size} ranks do not divide them; start {fitting} ranks")
    whole = settings.global_batch_size or (
        RECIPES[settings.model].global_batch_size if not settings.batch_size else None
    )
    if whole is not None:
        batch, factor = whole, 1
    else:
        factor = size * settings.gradient_accumulation
        batch = (settings.batch_size or DEFAULT_PER_RANK_BATCH_SIZE) * factor
        if RECIPES[settings.model].global_batch_size is not None:
            factor = 1  # its rate is not one of a batch of 128
    slices = shards or size * settings.gradient_accumulation
    if batch < slices:
        dealt = f"{shards} virtual shards" if shards else f"{size} ranks"
        if settings.gradient_accumulation > 1:
            dealt += f" times --gradient-accumulation {settings.gradient_accumulation}"
        raise UserError(f"the global batch of {batch} is smaller than {dealt}: make it larger, at least {slices}")
    if batch > examples:
        raise UserError(f"the global batch of {batch} is larger than the training set of {examples}: make it smaller")
    steps = -(-examples // batch)
    assert settings.epochs is not None, "settings are resolved"
    total = max(1, round(steps * settings.epochs))
    factor = settings.learning_rate_factor or factor
    warmup_epochs = settings.warmup_epochs if settings.warmup_epochs is not None else float(factor > 1)
    return Plan(examples, batch, steps, min(total, settings.max_steps or total), total, factor, warmup_epochs)


def precision_of(settings: TrainSettings) -> Precision:
    """The precision of settings that have one: after `resolve`, and for `fast` once the machine has been looked at."""
    assert settings.precision is not None, "settings are resolved"
    return settings.precision


def set_precision(precision: str, seed: int) -> None:
    """Types and seed of everything that Keras makes after this."""
    real = "float64" if precision == "float64" else "float32"
    keras.config.set_floatx(real)  # optimizers make their numbers in it
    keras.config.set_dtype_policy(real)  # and models cast their inputs to it; Keras keeps the first one otherwise
    keras.utils.set_random_seed(seed % 2**32)
