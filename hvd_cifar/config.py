"""Settings of a run and of its use: type, help and checks.

A field's name is its option (`global_batch_size` is `--global-batch-size`), its docstring is the option's help,
and its type is its check. The command line, a `--config` file and a Python program all make these classes. An
extension's settings stand in its file, those of other commands in `launch.settings` and `tools.settings`.
"""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, ByteSize, Field, model_validator

from hvd_cifar import extensions, fields
from hvd_cifar.errors import UserError
from hvd_cifar.fields import make as make  # settings of this file are made by it
from hvd_cifar.fields import option_name as option_name

LONGEST_DEFAULT_WARMUP = 1.0  # epochs
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


class DataSettings(fields.Settings):
    """Where the images come from."""

    dataset: fields.DatasetName = "auto"
    """cifar10, cifar100, the embedded synthetic set, or auto: CIFAR-10, and synthetic only where CIFAR-10 is neither
    there nor downloadable; folder:PATH: images in PATH/train/CLASS and PATH/test/CLASS, or in PATH/CLASS;
    FILE.py:NAME or package.module:NAME: a function that returns a hvd_cifar.Dataset."""
    image_size: fields.ImageSize | None = None
    """For folder:PATH: height and width of what the net sees, N or HxW. [default: the images' own size, if all have
    one]"""
    max_unreadable: int = Field(0, ge=0, le=fields.MOST_EXAMPLES)
    """For folder:PATH: how many images may be left out because they cannot be read. More end the run."""
    data_dir: fields.LocalPath = Field(Path("~/.cache/hvd_cifar/data"), validate_default=True)
    """Folder of the data set; CIFAR-10 or CIFAR-100 is downloaded there if it is absent."""


class RecipeChanges(fields.Settings):
    """Numbers of a recipe that a run changes (--set NAME=VALUE). None stands for the recipe's value."""

    learning_rate_factor: fields.Rate | None = None
    """factor of the learning rate, instead of that of the global batch"""
    warmup_epochs: fields.Span | None = None
    """epochs over which the learning rate rises to its full value"""
    weight_decay: fields.Finite | None = Field(None, ge=0, le=fields.LARGEST_RATE)
    """L2 factor"""
    ema_decay: fields.Fraction | None = None
    """decay of the weights' moving average, which evaluation uses; 0: no average"""
    label_smoothing: fields.Fraction | None = None
    """share of the target that is spread evenly over all classes"""
    lookahead: bool | None = None
    """average the weights with look-ahead"""
    image_scales: fields.Scales | None = None
    """factors that images are shrunk by, such as 0.75,1, each for an equal part of the steps"""
    test_time_augmentation: bool | None = None
    """evaluate on several views of each test image at the end"""


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

    model: fields.ModelSpec = Field(
        "fast",
        description=f"Net and recipe: {', '.join(fields.MODELS)}, or a function build(image_shape, classes) of yours "
        "that returns a Keras model, as FILE.py:NAME or package.module:NAME.",
    )
    compression: Literal["none", "fp16"] = "none"
    """Compression of gradients on the wire. fp16: two bytes a value."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """on: send gradients in buckets during the backward pass. off: send them in one message after it. auto: in buckets
    with --bucket-bytes, or between hosts if gradients are ready one after the other."""
    bucket_bytes: ByteSize | None = Field(None, gt=0)
    """Bytes of a bucket, such as 128KiB. [default: 1/16 of the gradients, at least 64KiB]"""
    precision: fields.Precision | None = None
    """Floating-point type of the computation. Without instructions for it mixed_bfloat16 is ten times slower. [default:
    float32; fast: mixed_bfloat16, if the processor or GPU has instructions for it]"""
    threads_per_rank: fields.ThreadCount | None = None
    """Threads of a rank on a CPU. [default: its share of the host's cores]"""

    @model_validator(mode="after")
    def _buckets_are_used(self: Options) -> Options:
        if self.bucket_bytes is not None and self.overlap == "off":
            raise ValueError("--bucket-bytes has no effect with --overlap off: leave one of them out")
        return self


Options = TypeVar("Options", bound=StepOptions)


class RunOptions(StepOptions):
    """Train a model; rank 0 writes the run directory."""

    batch_size: fields.ExampleCount | None = None
    """Examples that a rank processes at a time. The global batch is this times the number of ranks and
    --gradient-accumulation. [default: 128; more than 8 ranks of tutorial or a ResNet share 1024; fast has a global
    batch of 1024 on any number of ranks]"""
    global_batch_size: fields.ExampleCount | None = None
    """Examples per step over all ranks, instead of --batch-size. Training is then the same on any number of ranks, but
    for dropout; nets with batch norm also need --sync-batch-norm."""
    gradient_accumulation: fields.ExampleCount = 1
    """Micro-batches whose gradients a rank adds up before each all-reduce and update."""
    epochs: fields.Finite | None = Field(None, ge=1e-6, le=1_000_000)
    """Passes over the training set; the last may be partial, as in 9.9. In a shorter ResNet run the learning rate falls
    at the same fractions of the run as in the paper. [default: the recipe's; where --dataset auto takes the embedded
    set, 2, and 0.35 of fast]"""
    max_steps: fields.StepCount | None = None
    """End after this many steps if the epochs have more."""

    learning_rate: fields.Rate | None = None
    """Learning rate for the recipe's reference batch and optimizer. A model may have another recipe for large global
    batches. [default: the recipe's]"""
    set: Annotated[RecipeChanges, BeforeValidator(_changes), "NAME=VALUE"] = Field(
        RecipeChanges.model_validate({}),
        description="Change a number of the recipe, such as weight_decay=0; may be given several times. Names: "
        + "; ".join(f"{name}: {field.description}" for name, field in RecipeChanges.model_fields.items())
        + ".",
        json_schema_extra={"multiple": True},
    )
    clip_norm: fields.Norm | None = None
    """Clip the averaged gradient to this global norm. [default: no clipping]"""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of the data and the augmentation."""

    sync_batch_norm: bool = False
    """Compute batch norm's statistics over the global batch, not over each rank's examples. Training of a net with
    batch norm is then also the same on any number of ranks."""
    deterministic: bool | None = None
    """Use deterministic operations, and add gradients in a fixed order. A run with the same number of ranks and threads
    then repeats bit for bit. [default: only with --virtual-shards]"""
    virtual_shards: int | None = Field(None, gt=0, le=2**20)
    """Divide the global batch into N parts, a power of two, and add their gradients in a fixed order. Results are then
    the same, bit for bit, on any number of ranks that divides N. Implies --deterministic and one thread a rank.
    Excludes --gradient-accumulation, --sync-batch-norm and --compression."""
    log_every: fields.StepCount = 10
    """Steps between log lines."""
    quiet: bool = False
    """Print only warnings and errors. The run's files are as without it."""
    checkpoint_every: fields.StepCount = 1000
    """Steps between checkpoints; the newest 5 are kept."""
    checkpoint_minutes: fields.Span = 5
    """Minutes without a checkpoint after which the run writes one; 0: never."""
    grace_seconds: fields.Span = Field(30, gt=0)
    """Seconds that the run has to write a checkpoint and end, after a signal that asks it to stop (SIGTERM, SIGUSR1,
    SIGINT, SIGHUP); docs/reliability.md."""
    stall_seconds: fields.Span | None = None
    """Seconds without progress after which the ranks find the one that hangs, name it, and end the run (exit code 69);
    0: never. [default: 10 times the longest recent step, at least 60 s; docs/reliability.md]"""
    eval_every: fields.Interval | None = None
    """Steps between evaluations; 0: only at the end. [default: an epoch; fast: 3 epochs]"""
    hold_out: fields.ExampleCount | None = None
    """Hold out this many training examples, drawn by --seed, and evaluate on them during training. The test set is then
    used only at the end. [default: none; evaluate on the test set]"""
    resume: fields.PathOrWord = "auto"
    """auto: resume from the newest checkpoint in --run-dir, if there is one; PATH: start from that checkpoint, or from
    the newest one in that folder."""
    run_dir: fields.LocalPath | None = None
    """Folder for the run's output. [default: runs/MODEL-DATE-TIME, under ./run.sh with its process id]"""
    callbacks: fields.Callbacks = ()
    """Your callbacks, such as a.py:A,b.py:B: objects, or classes that are called without arguments."""

    @model_validator(mode="after")
    def _options_go_together(self) -> RunOptions:
        if self.batch_size is not None and self.global_batch_size is not None:
            raise ValueError("--batch-size and --global-batch-size exclude each other: give one of them")
        check_warmup(self.set.warmup_epochs, self.epochs)
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
        """Train a model; rank 0 writes the run directory."""
else:
    TrainSettings = extensions.with_settings("TrainSettings", RunOptions)


def unused_run_dir(model: str, suffix: str = "") -> Path:
    """A run directory that does not exist yet: runs/MODEL-DATE-TIME[-SUFFIX] in the current folder."""
    place, _, name = model.rpartition(":")
    label = f"{Path(place).stem}-{name}" if place else name  # of FILE.py:NAME and package.module:NAME
    stem = f"{label}-{datetime.now():%Y%m%d-%H%M%S}{suffix and f'-{suffix}'}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))  # two runs may start in one second
    return next(path for path in (Path("runs").absolute() / name for name in names) if not path.exists())


class RunSettings(fields.Settings):
    """A trained run, and the settings of its net that a command may override."""

    run_dir: fields.LocalPath
    """Folder of the run."""
    model: fields.ModelSpec | None = None
    """The function of the run's net, if it has moved. [default: as recorded]"""
    checkpoint: fields.LocalPath | None = None
    """Checkpoint to use. [default: the run's newest]"""
    test_time_augmentation: bool | None = None
    """Average the logits of six views of each image. [default: the run's]"""


class EvaluateSettings(RunSettings):
    """Evaluate a checkpoint on the whole test set."""

    dataset: fields.DatasetName | None = None
    """Data set to evaluate on. [default: the run's]"""
    data_dir: fields.LocalPath | None = None
    """Folder of the data set. [default: the run's]"""
    output: fields.LocalPath | None = None
    """JSON file to write the result to."""


class ValidateSettings(fields.Settings):
    """The command of validation ranks, as the launcher starts them."""

    run_dir: fields.LocalPath
    """Folder of the run."""
