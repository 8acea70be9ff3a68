"""Every setting of every command: its type, help and checks.

A field's name is its option (`global_batch_size` is `--global-batch-size`), its description is the option's help,
and its type is its check. The command line, a `--config` file and a Python program all make these classes. Settings of
an extension stand in its file.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from hvd_cifar import extensions
from hvd_cifar.errors import UserError, printable
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
    DataSource,
    Finite,
    LocalPath,
    ModelSpec,
    Overlap,
    Precision,
    RankCounts,
    Rests,
    Scale,
    Settings,
    Sizes,
    absolute_unless_word,
    address,
    not_empty,
    numbers,
    words,
)
from hvd_cifar.files import MOST_JSON_BYTES, replace_text

# Limit of a --config file that is not JSON. It is lower than that of JSON, since YAML parses slowly.
MOST_YAML_BYTES = 1 << 18
MOST_SHOWN = 80  # characters of a wrong value in an error message
LONGEST_DEFAULT_WARMUP = 1.0  # epochs

# Parts of a run's config.json that are facts about the run, not settings.
RECORDED_SECTIONS = ("run",)
BATCH = ("batch_size", "global_batch_size")


def check_warmup(warmup: float | None, epochs: float | None) -> None:
    """ValueError where the warm-up is longer than the run. One of up to `LONGEST_DEFAULT_WARMUP` is always accepted."""
    if epochs is not None and (warmup or 0.0) > max(epochs, LONGEST_DEFAULT_WARMUP):
        raise ValueError(f"--set warmup_epochs={warmup:g} is more than --epochs {epochs:g}: make it smaller")


def check_buckets(settings: RunOptions | BenchmarkStepSettings) -> None:
    """ValueError where --bucket-bytes has no effect."""
    if settings.bucket_bytes is not None and settings.overlap == "off":
        raise ValueError("--bucket-bytes has no effect with --overlap off: leave one of them out")


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
        "CIFAR-10 is neither there nor downloadable; folder:PATH: images in PATH/train/CLASS and PATH/test/CLASS; "
        "FILE.py:NAME or package.module:NAME: a function that returns a hvd_cifar.Dataset.",
    )
    data_dir: LocalPath = Field(
        Path("~/.cache/hvd_cifar/data"),
        validate_default=True,
        description="Folder of the data set; CIFAR-10 or CIFAR-100 is downloaded there if it is absent.",
    )
    data_source: DataSource = Field(
        "auto",
        description="Where a host gets the data set from. auto: from its own --data-dir, else from rank 0 over the "
        "network; rank0: from rank 0 also where its own set differs or is damaged; local: each host by itself.",
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
    image_scales: Annotated[tuple[Scale, ...], BeforeValidator(numbers)] | None = Field(
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


class RunOptions(DataSettings):
    """One training run. None stands for the recipe's value (`models.recipe`)."""

    model: ModelSpec = Field(
        "fast",
        description=f"Net and recipe: {', '.join(MODELS)}, or a function build(image_shape, classes) of yours that "
        "returns a Keras model, as FILE.py:NAME or package.module:NAME.",
    )

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
    compression: Compression = Field(
        "none",
        description="Compression of gradients on the wire. fp16: two bytes a value.",
    )
    overlap: Overlap = Field(
        "auto",
        description="on: send gradients in buckets during the backward pass. off: send them in one message after it. "
        "auto: measure before the first step, and take the faster way; on one host without GPUs one message unless "
        "--bucket-bytes is given.",
    )
    bucket_bytes: Bytes | None = Field(
        None, gt=0, description="Bytes of a bucket, such as 128K. [default: measured before the first step]"
    )
    precision: Precision | None = Field(
        None,
        description="Floating-point type of the computation. [default: float32; fast: mixed_bfloat16, if the "
        "processor or GPU has instructions for it]",
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
    threads_per_rank: int | None = Field(
        None,
        gt=0,
        le=MOST_THREADS,
        description="CPU threads of a rank. [default: its share of the host's cores]",
    )

    log_every: int = Field(10, gt=0, le=MOST_STEPS, description="Steps between log lines.")
    quiet: bool = Field(False, description="Print only warnings and errors. The run's files are as without it.")
    checkpoint_every: int = Field(
        1000, gt=0, le=MOST_STEPS, description="Steps between checkpoints; the newest 5 are kept."
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
    def _buckets_are_used(self) -> RunOptions:
        check_buckets(self)
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


class RunSettings(Settings):
    """A trained run, and the settings of its net that a command may override."""

    run_dir: LocalPath = Field(description="Folder of the run.")
    model: ModelSpec | None = Field(
        None, description="The function of the run's net, if it has moved. [default: as recorded]"
    )
    checkpoint: LocalPath | None = Field(None, description="Checkpoint to use. [default: the run's newest]")
    test_time_augmentation: bool | None = Field(
        None,
        description="Average the logits of six views of each image; `evaluate` takes two where the two largest logits "
        "then differ by 2 or more. [default: the run's]",
    )


class EvaluateSettings(RunSettings):
    """One evaluation of a run's checkpoint on the test set."""

    dataset: DatasetName | None = Field(None, description="Data set to evaluate on. [default: the run's]")
    data_dir: LocalPath | None = Field(None, description="Folder of the data set. [default: the run's]")
    batch_size: int | None = Field(
        None,
        gt=0,
        le=MOST_EXAMPLES,
        description="Examples a rank evaluates at a time. [default: 500 of 32 x 32 pixels, fewer of larger images]",
    )
    confusion: bool = Field(
        False,
        description="Write confusion.json, with the confusion matrix and the worst mistakes, into the folder of "
        "--output. [default folder: --run-dir]",
    )
    output: LocalPath | None = Field(None, description="JSON file to write the result to.")


class _UseSettings(RunSettings):
    run_dir: LocalPath = Field(description="Folder of the run.", json_schema_extra={"argument": "RUN_DIR"})


class ExportSettings(_UseSettings):
    """A trained net as files that TensorFlow loads without this package."""

    to: LocalPath = Field(description="Folder to write; it must not exist, or be empty.")


class PredictSettings(_UseSettings):
    """Images for a trained net to classify."""

    images: tuple[Annotated[Path, BeforeValidator(not_empty)], ...] = Field(
        min_length=1, description="Image files, and folders of them.", json_schema_extra={"argument": "IMAGE..."}
    )
    as_json: bool = Field(
        False,
        description="Print one JSON object a line, with the probabilities of all classes.",
        json_schema_extra={"flags": ["--json"]},
    )


class ValidateSettings(Settings):
    """The command of validation ranks, as the launcher starts them."""

    run_dir: LocalPath = Field(description="Folder of the run.")


class _BenchmarkOutput(Settings):
    json_file: LocalPath | None = Field(None, description="JSON file to write the result to.")
    plot_file: LocalPath | None = Field(None, description="PNG file to draw the result in.")


class BenchmarkStepSettings(DataSettings, _BenchmarkOutput):
    """How long a training step and its parts take on 1 to N ranks: the step of `train` with the same settings."""

    model: ModelSpec = Field("fast", description=str(TrainSettings.model_fields["model"].description))
    batch_size: int = Field(
        DEFAULT_PER_RANK_BATCH_SIZE, gt=0, le=MOST_EXAMPLES, description="Examples a rank processes at a time."
    )
    precision: Precision | None = Field(None, description=str(TrainSettings.model_fields["precision"].description))
    threads_per_rank: int | None = Field(
        None,
        gt=0,
        le=MOST_THREADS,
        description="CPU threads of a rank. [default: its share of the host's cores]",
    )
    compression: Compression = Field("none", description=str(TrainSettings.model_fields["compression"].description))
    overlap: Overlap = Field("auto", description=str(TrainSettings.model_fields["overlap"].description))
    bucket_bytes: Bytes | None = Field(
        None, gt=0, description=str(TrainSettings.model_fields["bucket_bytes"].description)
    )
    steps: int = Field(10, gt=0, le=MOST_STEPS, description="Steps in one measurement.")
    repeats: int = Field(5, gt=0, le=MOST_STEPS, description="Measurements of each kind, after a warm-up measurement.")
    ranks: RankCounts | None = Field(
        None, description="Numbers of ranks to measure, such as 1,2,3. [default: powers of two, and all]"
    )
    min_efficiency: Finite | None = Field(
        None,
        gt=0,
        le=1,
        description="End with exit code 1 where the scaling efficiency on the most ranks is lower than this fraction.",
    )

    @model_validator(mode="after")
    def _buckets_are_used(self) -> BenchmarkStepSettings:
        check_buckets(self)
        return self


class BenchmarkAllreduceSettings(_BenchmarkOutput):
    """How long all-reduces of many sizes take."""

    ranks: RankCounts | None = Field(
        None, description="Numbers of ranks to measure, such as 2,4. [default: powers of two, and all]"
    )
    min_bytes: Bytes = Field(
        4, ge=4, validate_default=True, description="Smallest message; K, M, G are powers of 1024."
    )
    max_bytes: Bytes = Field(2**28, ge=4, description="Largest message.")
    factor: int = Field(2, ge=2, le=2**40, description="Ratio of each size to the one before.")
    seconds: Finite = Field(0.3, gt=0, description="Approximate seconds per size and method.")
    iterations: int = Field(
        100, gt=0, le=MOST_STEPS, description="Maximum number of all-reduces in one measurement of a size."
    )
    repeats: int = Field(
        5, gt=0, le=MOST_STEPS, description="Measurements of each size and method; methods take turns."
    )

    @model_validator(mode="after")
    def _sizes_ascend(self) -> BenchmarkAllreduceSettings:
        if self.min_bytes > self.max_bytes:
            raise ValueError(f"--min-bytes {self.min_bytes} is more than --max-bytes {self.max_bytes}: make it smaller")
        return self


class ReportSettings(Settings):
    """A page about runs."""

    run_dirs: tuple[LocalPath, ...] = Field(
        min_length=1, description="Folders of runs; several are compared.", json_schema_extra={"argument": "RUN_DIR..."}
    )
    benchmarks: Annotated[tuple[LocalPath, ...], BeforeValidator(words)] = Field(
        (), description="--json files of `benchmark` to draw as well, separated by commas."
    )
    output: LocalPath | None = Field(
        None, description="HTML file to write. [default: report.html in the first RUN_DIR]"
    )


class WatchSettings(Settings):
    """A run to watch."""

    run_dir: LocalPath = Field(description="Folder of the run.", json_schema_extra={"argument": "RUN_DIR"})
    quiet: bool = Field(False, description="Print only how the run ends.")


class HostSettings(Settings):
    """Where ranks run."""

    hostfile: LocalPath | None = Field(
        None, description="File of hosts, a line `NAME slots=N` each. [default: this machine; in a Slurm job its nodes]"
    )
    hosts: str | None = Field(
        None, description="The same as NAME:SLOTS,NAME:SLOTS.", json_schema_extra={"flags": ["-H", "--hosts"]}
    )
    ranks: int | None = Field(
        None,
        gt=0,
        le=999_999,
        description="Ranks of the run; they fill one host after the other. [default: all slots; here one per GPU, "
        "else per core, at most 8]",
        json_schema_extra={"flags": ["-np", "-n", "--ranks"]},
    )
    allreduce: Literal["auto", "ring"] = Field("auto", description="`auto`: MPI or NCCL chooses the algorithm.")

    @model_validator(mode="after")
    def _hosts_are_given_once(self: H) -> H:
        if self.hostfile is not None and self.hosts is not None:
            raise ValueError("-H and --hostfile exclude each other: give one of them")
        return self


H = TypeVar("H", bound="HostSettings")


class LaunchSettings(HostSettings):
    """The launcher's options, which stand before the command."""

    max_restarts: int = Field(0, gt=0, description="Start a failed job again from its newest checkpoint, N times.")
    validation_ranks: int = Field(0, gt=0, description="Ranks that evaluate while the others train.")
    elastic: Sizes | None = Field(None, description="MIN:MAX ranks: continue without lost ranks, with added ones.")
    host_discovery_script: LocalPath | None = Field(None, description="Program that prints lines HOST:SLOTS.")
    elastic_timeout: int | None = Field(None, gt=0, description="Seconds to wait for enough ranks. [default: 600]")
    cool_down: Rests | None = Field(None, description="FIRST:LONGEST seconds of rest after a loss. [default: 10:300]")
    dry_run: bool = Field(
        False,
        description="Print the command that starts the ranks, and do not run it.",
        json_schema_extra={"flags": ["--dry-run"]},
    )

    @model_validator(mode="after")
    def _elastic_jobs_are_consistent(self) -> LaunchSettings:
        if self.elastic is None:
            for name in ("host_discovery_script", "elastic_timeout", "cool_down"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{option_name(name)} goes with --elastic MIN:MAX")
            return self
        least, most = self.elastic
        if self.ranks and not least <= self.ranks <= most:
            raise ValueError(f"-np {self.ranks} is not within --elastic {least}:{most}")
        if self.max_restarts:
            raise ValueError("--elastic starts ranks again by itself: leave --max-restarts out")
        if self.host_discovery_script and (self.hosts or self.hostfile):
            raise ValueError("--host-discovery-script names the hosts: leave -H and --hostfile out")
        return self


class DoctorSettings(HostSettings):
    """What the doctor checks: hosts as for the launcher, and the folder of a run."""

    run_dir: LocalPath = Field(Path("runs"), validate_default=True, description="The run's folder for output.")
    probe_timeout: Finite = Field(30, gt=0, le=86_400, description="Seconds that a host may take to answer.")
    job_timeout: Finite = Field(180, gt=0, le=86_400, description="Seconds after which the small job is ended.")
    as_json: bool = Field(
        False, description="Print facts and findings as JSON, not as a table.", json_schema_extra={"flags": ["--json"]}
    )


class DoctorJobSettings(Settings):
    """The command of the doctor's small job, as the doctor starts its ranks."""

    per_host: str = Field(
        pattern=r"^[1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*$", description="Ranks on each host in turn, such as 2,1,1."
    )


S = TypeVar("S", bound=Settings)


def option_name(field: str) -> str:
    """`global_batch_size` -> `--global-batch-size`, `json_file` -> `--json`."""
    return "--" + field.removesuffix("_file").replace("_", "-")


def _told_name(kind: type[S], field: str) -> str:
    """What the command line calls a field: its option, or its argument."""
    info = kind.model_fields.get(field)
    extra = info.json_schema_extra if info else None
    if not isinstance(extra, dict):
        return option_name(field)
    flags = extra.get("flags")
    return (
        str(extra["argument"])
        if "argument" in extra
        else str(flags[0])
        if isinstance(flags, list)
        else option_name(field)
    )


def make(kind: type[S], values: dict[str, Any]) -> S:
    """Validate `values` (field name -> value, text is converted) into settings.

    Raises:
        UserError: with one line that names the first wrong option, its value and what it must be.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as failure:
        first = failure.errors()[0]
        if not first["loc"]:  # a check of several fields writes the whole message
            raise UserError(str(first["ctx"]["error"]) if "ctx" in first else first["msg"]) from None
        option = _told_name(kind, str(first["loc"][0]))
        if len(first["loc"]) > 1 and isinstance(first["loc"][1], str):  # one of --set
            option += f" {first['loc'][1]}"
        if first["type"] == "missing":
            raise UserError(f"{option} is required") from None
        if first["type"] == "extra_forbidden":
            raise UserError(f"{option} is no setting of this command (see --help)") from None
        message = first["msg"].removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        raise UserError(f"{option} {_shown(first['input'])}: {message}") from None


def _shown(value: Any) -> str:
    """A wrong value as an error message shows it: on one line, at most `MOST_SHOWN` characters."""
    text = re.sub("//[^/]*@", "//...@", printable(str(value)))  # a password
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


class _Reader(yaml.SafeLoader):
    """YAML without duplicate keys, and without aliases: a few lines of them can expand to gigabytes.

    A plain value is text, as on the command line, and the field's type converts it. YAML 1.1 would make `off` False,
    `10:20` 620 and `010` 8. Only null (`null`, `~` or nothing), which stands for the recipe's value, is no text.
    """

    yaml_implicit_resolvers = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise _Refused("it has an alias (*name); write the value itself")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key.value, str)]
        _refuse_duplicates(names)
        return super().construct_mapping(node, deep)


_Reader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(~|null|Null|NULL|)\Z"), ["~", "n", "N", ""])


class _Refused(Exception):
    """Why a file of settings is not read, and what to do."""


def _refuse_duplicates(names: list[str]) -> None:
    names = [name.replace("-", "_") for name in names]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise _Refused(f"{_shown(twice)} is there twice; leave one out")


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_duplicates([name for name, _ in pairs])
    return dict(pairs)


def _parse(data: bytes) -> Any:
    """The content of a file of settings. Raises _Refused and what `read_file` lists."""
    text = data.decode()
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError:
        if len(data) > MOST_YAML_BYTES:
            raise _Refused(f"it has more than {MOST_YAML_BYTES:,} bytes; give a file of settings") from None
    return yaml.load(text, _Reader)  # a SafeLoader


def read_file(path: Path, has_batch: bool = False) -> dict[str, Any]:
    """Settings of a YAML or JSON file, such as a run's config.json, as field name -> value.

    Args:
        has_batch: whether an option gives the batch. The file's batch is then left out.

    Raises:
        UserError: where the file is not readable, too large or holds no mapping.
    """
    remedy = "give a YAML or JSON file of settings"
    try:
        with path.open("rb") as file:
            data = file.read(MOST_JSON_BYTES + 1)
        if len(data) > MOST_JSON_BYTES:
            raise _Refused(f"it has more than {MOST_JSON_BYTES:,} bytes; {remedy}")
        content = _parse(data)
    except OSError as failure:
        raise UserError(f"--config {path}: {failure.strerror}; {remedy}") from None
    except UnicodeDecodeError:
        raise UserError(f"--config {path}: is not text; {remedy}") from None
    except _Refused as refused:
        raise UserError(f"--config {path}: {refused}") from None
    except yaml.YAMLError as failure:
        mark = getattr(failure, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise UserError(f"--config {path}: is neither YAML nor JSON{where}; write one 'name: value' a line") from None
    except RecursionError:
        raise UserError(f"--config {path}: its lists are nested too deeply; write one 'name: value' a line") from None
    except (ValueError, TypeError, AttributeError, LookupError) as failure:  # a malformed key, or value of a tag
        reason = _shown(" ".join(str(failure).split()))
        raise UserError(f"--config {path}: holds a value that cannot be read ({reason}); correct it") from None
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"--config {path}: holds no settings; write one 'name: value' a line")
    if RECORDED_SECTIONS[0] in content and "set" not in content:
        content = _of_version_02(content)
    left_out = {*RECORDED_SECTIONS}
    if has_batch:
        left_out |= {*BATCH}
    return {name: value for key, value in content.items() if (name := key.replace("-", "_")) not in left_out}


def _of_version_02(record: dict[str, Any]) -> dict[str, Any]:
    """The record of a run of version 0.2 as settings: the recipe's numbers were settings of their own."""
    names = [name for name in RecipeChanges.model_fields if record.get(name) not in (None, "recipe")]
    known = {name: value for name, value in record.items() if name in TrainSettings.model_fields or name == "run"}
    return {**known, "set": {name: record[name] for name in names}}


def unused_run_dir(model: str, suffix: str = "") -> Path:
    """A run directory that does not exist yet: runs/MODEL-DATE-TIME[-SUFFIX] in the current folder."""
    place, _, name = model.rpartition(":")
    label = f"{Path(place).stem}-{name}" if place else name  # of FILE.py:NAME and package.module:NAME
    stem = f"{label}-{datetime.now():%Y%m%d-%H%M%S}{suffix and f'-{suffix}'}"
    names = itertools.chain([stem], (f"{stem}-{i}" for i in itertools.count(2)))  # two runs may start in one second
    return next(path for path in (Path("runs").absolute() / name for name in names) if not path.exists())


def write_file(path: Path, settings: Settings, run: dict[str, Any]) -> None:
    """Write settings as config.json, and under "run" the facts of the run, such as versions and ranks."""
    content = {**settings.model_dump(mode="json"), "run": run}
    replace_text(path, json.dumps(content, indent=2) + "\n")
