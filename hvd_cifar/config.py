"""Settings of a run and of its evaluation: type, help and checks.

A field's name is its option (`global_batch_size` is `--global-batch-size`), its description is the option's help,
and its type is its check. The command line, a `--config` file and a Python program all make these classes. Settings of
an extension stand in its file, those of other commands in `launch.settings` and `tools.settings`.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hvd_cifar import extensions
from hvd_cifar.errors import UserError
from hvd_cifar.fields import (
    DEFAULT_PER_RANK_BATCH_SIZE,
    FEWEST_EPOCHS,
    LARGEST_RATE,
    MODELS,
    MOST_EXAMPLES,
    MOST_STEPS,
    MOST_THREADS,
    SMALLEST_NORM,
    Bytes,
    Callbacks,
    Compression,
    DatasetName,
    Finite,
    ImageSize,
    LocalPath,
    ModelSpec,
    Overlap,
    Precision,
    Scale,
    Settings,
    absolute_unless_word,
    address,
    words,
)
from hvd_cifar.fields import make as make  # settings of this file are made by it
from hvd_cifar.fields import option_name as option_name

LONGEST_DEFAULT_WARMUP = 1.0  # epochs

# Parts of a run's config.json that are facts about the run, not settings.
RECORDED_SECTIONS = ("run",)
BATCH = ("batch_size", "global_batch_size")


def check_warmup(warmup: float | None, epochs: float | None) -> None:
    """ValueError where the warm-up is longer than the run. One of up to `LONGEST_DEFAULT_WARMUP` is always accepted."""
    if epochs is not None and (warmup or 0.0) > max(epochs, LONGEST_DEFAULT_WARMUP):
        raise ValueError(f"--set warmup_epochs={warmup:g} is more than --epochs {epochs:g}: make it smaller")


def check_ranks(settings: RunOptions, ranks: int) -> None:
    """UserError where ranks do not divide --virtual-shards, or a micro-batch of the global batch would be empty."""
    shards, batch = settings.virtual_shards, settings.global_batch_size
    if shards is not None and shards % ranks:
        fitting = ", ".join(str(2**i) for i in range(shards.bit_length()))
        raise UserError(f"--virtual-shards {shards}: {ranks} ranks do not divide them; start {fitting} ranks")
    micro_batches = shards or ranks * settings.gradient_accumulation
    if batch is not None and batch < micro_batches:
        dealt = f"{shards} virtual shards" if shards else f"{ranks} ranks"
        if settings.gradient_accumulation > 1:
            dealt += f" times --gradient-accumulation {settings.gradient_accumulation}"
        raise UserError(f"the global batch of {batch} is smaller than {dealt}: make it at least {micro_batches}")


class DataSettings(Settings):
    """Where the images come from."""

    dataset: DatasetName = Field(
        "auto",
        description="cifar10, cifar100, the embedded synthetic set, or auto: CIFAR-10, and synthetic only where "
        "CIFAR-10 is neither there nor downloadable; folder:PATH: images in PATH/train/CLASS and "
        "PATH/test/CLASS, or in PATH/CLASS; "
        "FILE.py:NAME or package.module:NAME: a function that returns a hvd_cifar.Dataset.",
    )
    image_size: ImageSize | None = Field(
        None,
        description="Height and width of what the net sees, N or HxW, of a folder: whose images have many sizes. "
        "[default: their own size, if all have one]",
        json_schema_extra={"metavar": "HxW"},
    )
    max_unreadable: int = Field(
        0,
        ge=0,
        le=MOST_EXAMPLES,
        description="Images of a folder: that may be left out since they cannot be read. More end the run.",
    )
    data_dir: LocalPath = Field(
        Path("~/.cache/hvd_cifar/data"),
        validate_default=True,
        description="Folder of the data set; CIFAR-10 or CIFAR-100 is downloaded there if it is absent.",
    )
    data_url: Annotated[str, AfterValidator(address)] | None = Field(
        None,
        description="Address of a copy of the archive with the data set's binary files; its published MD5 checksum is "
        "compared. [default: its authors']",
    )


class RecipeChanges(Settings):
    """Numbers of a recipe that a run changes (--set NAME=VALUE). None stands for the recipe's value."""

    learning_rate_factor: Finite | None = Field(
        None, gt=0, le=LARGEST_RATE, description="factor of the learning rate, instead of that of the global batch"
    )
    warmup_epochs: Finite | None = Field(
        None, ge=0, le=1_000_000, description="epochs over which the learning rate rises to its full value"
    )
    weight_decay: Finite | None = Field(None, ge=0, le=LARGEST_RATE, description="L2 factor")
    ema_decay: Finite | None = Field(
        None, ge=0, lt=1, description="decay of the weights' moving average, which evaluation uses; 0: no average"
    )
    label_smoothing: Finite | None = Field(
        None, ge=0, lt=1, description="share of the target that is spread evenly over all classes"
    )
    lookahead: bool | None = Field(None, description="average the weights with look-ahead")
    image_scales: Annotated[tuple[Scale, ...], BeforeValidator(words)] | None = Field(
        None, description="factors that images are shrunk by, such as 0.75,1, each for an equal part of the steps"
    )
    augmentation: Literal["none"] | None = Field(None, description="none: train on images as in evaluation")
    test_time_augmentation: bool | None = Field(
        None, description="evaluate on several views of each test image at the end"
    )

    @property
    def given(self) -> dict[str, Any]:
        """The numbers that change, by their names in the recipe."""
        return self.model_dump(exclude_none=True)


NO_CHANGES = RecipeChanges.model_validate({})


def _changes(given: Any) -> Any:
    """Texts such as weight_decay=0 as {"weight_decay": "0"}."""
    if not isinstance(given, list | tuple):
        return given
    pairs = [str(text).partition("=") for text in given]
    if wrong := next((name for name, sign, _ in pairs if not sign), None):
        raise ValueError(f"write NAME=VALUE, such as weight_decay=0, not {wrong}")
    return {name.strip().replace("-", "_"): value for name, _, value in pairs}


class StepOptions(DataSettings):
    """What `train` and `benchmark step` compute, and how."""

    model: ModelSpec = Field(
        "fast",
        description=f"Net and recipe: {', '.join(MODELS)}, or a function build(image_shape, classes) of yours that "
        "returns a Keras model, as FILE.py:NAME or package.module:NAME.",
    )
    compression: Compression = Field(
        "none",
        description="Compression of gradients on the wire. fp16: two bytes a value.",
    )
    overlap: Overlap = Field(
        "auto",
        description="on: send gradients in buckets during the backward pass. off: send them in one message after it. "
        "auto: in buckets between hosts, where gradients are ready one after the other, or with --bucket-bytes.",
    )
    bucket_bytes: Bytes | None = Field(
        None, gt=0, description="Bytes of a bucket, such as 128K. [default: 1/16 of the gradients, at least 64K]"
    )
    precision: Precision | None = Field(
        None,
        description="Floating-point type of the computation. [default: float32; fast: mixed_bfloat16, if the "
        "processor or GPU has instructions for it]",
    )
    threads_per_rank: int | None = Field(
        None,
        gt=0,
        le=MOST_THREADS,
        description="CPU threads of a rank. [default: its share of the host's cores]",
    )

    @model_validator(mode="after")
    def _buckets_are_used(self: Options) -> Options:
        if self.bucket_bytes is not None and self.overlap == "off":
            raise ValueError("--bucket-bytes has no effect with --overlap off: leave one of them out")
        return self


Options = TypeVar("Options", bound=StepOptions)


class RunOptions(StepOptions):
    """One training run. None stands for the recipe's value (`models.recipe`)."""

    batch_size: int | None = Field(
        None,
        gt=0,
        le=MOST_EXAMPLES,
        description="Examples that a rank processes at a time. The global batch is this times the number of ranks and "
        "--gradient-accumulation. [default: "
        f"{DEFAULT_PER_RANK_BATCH_SIZE}; more than 8 ranks of tutorial or a ResNet share 1024; fast has a global batch "
        "of 1024 on any number of ranks]",
    )
    global_batch_size: int | None = Field(
        None,
        gt=0,
        le=MOST_EXAMPLES,
        description="Examples per step over all ranks, instead of --batch-size. Training is then the same on any "
        "number of ranks; nets with batch norm also need --sync-batch-norm.",
    )
    gradient_accumulation: int = Field(
        1,
        gt=0,
        le=MOST_EXAMPLES,
        description="Micro-batches whose gradients a rank adds up before each all-reduce and update.",
    )
    epochs: Finite | None = Field(
        None,
        ge=FEWEST_EPOCHS,
        le=1_000_000,
        description="Passes over the training set; the last may be partial, as in 9.9. In a shorter ResNet run "
        "the learning rate falls at the same fractions of the run as in the paper. [default: the recipe's; where "
        "--dataset auto takes the embedded set, 2, and 0.35 of fast]",
    )
    max_steps: int | None = Field(
        None, gt=0, le=MOST_STEPS, description="End after this many steps if the epochs have more."
    )

    learning_rate: Finite | None = Field(
        None,
        gt=0,
        le=LARGEST_RATE,
        description="Learning rate for the recipe's reference batch and optimizer. A model may have another recipe "
        "for large global batches. [default: the recipe's]",
    )
    set: Annotated[RecipeChanges, BeforeValidator(_changes)] = Field(
        NO_CHANGES,
        description="Change a number of the recipe, such as weight_decay=0; may be given several times. Names: "
        + "; ".join(f"{name}: {field.description}" for name, field in RecipeChanges.model_fields.items())
        + ".",
        json_schema_extra={"metavar": "NAME=VALUE", "multiple": True},
    )
    clip_norm: Finite | None = Field(
        None,
        ge=SMALLEST_NORM,
        le=LARGEST_RATE,
        description="Clip the averaged gradient to this global norm. [default: no clipping]",
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="Seed of the initial weights, the order of the data and the augmentation."
    )

    sync_batch_norm: bool = Field(
        False,
        description="Compute batch norm's statistics over the global batch, not over each rank's examples. Training "
        "of a net with batch norm is then also the same on any number of ranks.",
    )
    deterministic: bool | None = Field(
        None,
        description="Use deterministic operations, and add gradients in a fixed order. A run with the same number of "
        "ranks and threads then repeats bit for bit. [default: only with --virtual-shards]",
    )
    virtual_shards: int | None = Field(
        None,
        gt=0,
        le=2**20,
        description="Divide the global batch into N parts, a power of two, and add their gradients in a fixed order. "
        "Results are then the same, bit for bit, on any number of ranks that divides N. Implies --deterministic and "
        "one thread a rank. Excludes --gradient-accumulation, --sync-batch-norm and --compression.",
    )
    log_every: int = Field(10, gt=0, le=MOST_STEPS, description="Steps between log lines.")
    quiet: bool = Field(False, description="Print only warnings and errors. The run's files are as without it.")
    checkpoint_every: int = Field(
        1000, gt=0, le=MOST_STEPS, description="Steps between checkpoints; the newest 5 are kept."
    )
    checkpoint_minutes: Finite = Field(
        5, ge=0, le=1_000_000, description="Minutes without a checkpoint after which the run writes one; 0: never."
    )
    grace_seconds: Finite = Field(
        30,
        gt=0,
        le=1_000_000,
        description="Seconds that the run has to write a checkpoint and end, after a signal that asks it to stop "
        "(SIGTERM, SIGUSR1, SIGINT, SIGHUP); docs/reliability.md.",
    )
    stall_seconds: Finite | None = Field(
        None,
        ge=0,
        description="Seconds without progress after which the ranks find the one that hangs, name it, and end the run "
        "(exit code 69); 0: never. [default: 10 times the longest recent step, at least 60 s; "
        "docs/reliability.md]",
    )
    eval_every: int | None = Field(
        None,
        ge=0,
        le=MOST_STEPS,
        description="Steps between evaluations; 0: only at the end. [default: an epoch; fast: 3 epochs]",
    )
    hold_out: int | None = Field(
        None,
        gt=0,
        le=MOST_EXAMPLES,
        description="Hold out this many training examples, drawn by --seed, and evaluate on them during training. The "
        "test set is then used only at the end. [default: none; evaluate on the test set]",
    )
    resume: Annotated[str, AfterValidator(absolute_unless_word)] = Field(
        "auto",
        min_length=1,
        description="auto: resume from the newest checkpoint in --run-dir, if there is one; never: refuse a --run-dir "
        "that has one; PATH: start from that checkpoint, or from the newest one in that folder.",
    )
    changed_code: Literal["refuse", "accept"] = Field(
        "refuse",
        description="What a resumed run does where files of its net, recipe or data set, or its test set, are not "
        "those that it was started with. refuse: end; accept: go on with those of now.",
    )
    run_dir: LocalPath | None = Field(
        None,
        description="Folder for the run's output. [default: runs/MODEL-DATE-TIME; with --max-restarts, --elastic or "
        "--validation-ranks also the launcher's process id]",
    )
    callbacks: Callbacks = Field(
        (), description="Your callbacks, such as a.py:A,b.py:B: objects, or classes that are called without arguments."
    )

    @model_validator(mode="after")
    def _batch_is_given_once(self) -> RunOptions:
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("--batch-size and --global-batch-size exclude each other: give one of them")
        return self

    @model_validator(mode="after")
    def _warmup_fits_the_run(self) -> RunOptions:
        check_warmup(self.set.warmup_epochs, self.epochs)
        return self

    @model_validator(mode="after")
    def _virtual_shards_go_with_the_rest(self) -> RunOptions:
        shards = self.virtual_shards
        if shards is None:
            return self
        if shards & (shards - 1):
            raise ValueError(f"--virtual-shards {shards}: not a power of two; give 2, 4, 8, ...")
        for option, given, why in (
            ("--gradient-accumulation", self.gradient_accumulation > 1, "a rank computes its shards in turn already"),
            ("--sync-batch-norm", self.sync_batch_norm, "each virtual shard has batch-norm statistics of its own"),
            ("--compression", self.compression != "none", "it rounds what each rank sends"),
            ("--no-deterministic", self.deterministic is False, "the same bits need deterministic operations"),
        ):
            if given:
                raise ValueError(f"--virtual-shards and {option} exclude each other: {why}; leave one out")
        return self


if TYPE_CHECKING:

    class TrainSettings(RunOptions):
        """The options of a run and of all extensions."""
else:
    TrainSettings = extensions.with_settings("TrainSettings", RunOptions)


def unused_run_dir(model: str, suffix: str = "") -> Path:
    """A run directory that does not exist yet: runs/MODEL-DATE-TIME[-SUFFIX] in the current folder."""
    place, _, name = model.rpartition(":")
    label = f"{Path(place).stem}-{name}" if place else name  # of FILE.py:NAME and package.module:NAME
    stem = f"{label}-{datetime.now():%Y%m%d-%H%M%S}{suffix and f'-{suffix}'}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))  # two runs may start in one second
    return next(path for path in (Path("runs").absolute() / name for name in names) if not path.exists())
