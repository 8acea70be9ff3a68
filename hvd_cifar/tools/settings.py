"""Settings of the tools' commands. They import nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ByteSize, Field

from hvd_cifar import fields
from hvd_cifar.config import RunSettings, StepOptions
from hvd_cifar.launch.settings import HostSettings


class _OneRunSettings(RunSettings):
    run_dir: fields.LocalPath = Field(json_schema_extra={"argument": "RUN_DIR"})
    """Folder of the run."""


class ExportSettings(_OneRunSettings):
    """Write a trained net as a SavedModel, which TensorFlow loads without this package."""

    to: fields.LocalPath
    """Folder to write; it must not exist, or be empty."""


class PredictSettings(_OneRunSettings):
    """Classify image files and folders of them with a trained net; exit code 2 if one cannot be read."""

    images: tuple[Annotated[Path, BeforeValidator(fields.not_empty)], ...] = Field(
        min_length=1, json_schema_extra={"argument": "IMAGE..."}
    )
    """Image files, and folders of them."""
    as_json: bool = Field(False, json_schema_extra={"flags": ["--json"]})
    """Print one JSON object a line, with the probabilities of all classes."""


class _BenchmarkOutput(fields.Settings):
    json_file: fields.LocalPath | None = Field(None, json_schema_extra={"flags": ["--json"]})
    """JSON file to write the result to."""


class BenchmarkStepSettings(StepOptions, _BenchmarkOutput):
    """Measure the training step: speed, parts of its time, scaling efficiency."""

    batch_size: fields.ExampleCount = fields.DEFAULT_PER_RANK_BATCH_SIZE
    """Examples a rank processes at a time."""
    steps: fields.StepCount = 10
    """Steps in one measurement."""
    repeats: fields.StepCount = 5
    """Measurements of each kind, after a warm-up measurement."""
    min_efficiency: fields.Finite | None = Field(None, gt=0, le=1)
    """End with exit code 1 where the scaling efficiency is lower than this fraction."""


class BenchmarkAllreduceSettings(_BenchmarkOutput):
    """Measure Horovod's all-reduces of many sizes: time, bandwidth, right sums."""

    max_bytes: ByteSize = Field(ByteSize(2**28), ge=4)
    """Largest message, such as 16MiB."""
    factor: int = Field(2, ge=2, le=2**40)
    """Ratio of each size to the one before."""


class ReportSettings(fields.Settings):
    """Write a page (HTML) about runs: what ran, curves, where the time went, what happened, mistakes."""

    run_dirs: tuple[fields.LocalPath, ...] = Field(min_length=1, json_schema_extra={"argument": "RUN_DIR..."})
    """Folders of runs; several are compared."""
    output: fields.LocalPath | None = None
    """HTML file to write. [default: report.html in the first RUN_DIR]"""


class DoctorSettings(HostSettings):
    """Check all hosts at once for the usual faults, and run a small job; exit code 1 if a run would fail."""

    probe_timeout: fields.Finite = Field(30, gt=0, le=86_400)
    """Seconds that a host may take to answer."""
    job_timeout: fields.Finite = Field(180, gt=0, le=86_400)
    """Seconds after which the small job is ended."""
    as_json: bool = Field(False, json_schema_extra={"flags": ["--json"]})
    """Print facts and findings as JSON, not as a table."""


class DoctorJobSettings(fields.Settings):
    """The command of the doctor's small job, as the doctor starts its ranks."""
