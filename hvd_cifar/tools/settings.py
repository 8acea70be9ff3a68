"""Settings of the tools' commands. They import nothing heavy."""

from __future__ import annotations

from pydantic import Field, model_validator

from hvd_cifar.config import StepOptions
from hvd_cifar.fields import (
    DEFAULT_PER_RANK_BATCH_SIZE,
    MOST_EXAMPLES,
    MOST_STEPS,
    Bytes,
    Finite,
    LocalPath,
    Settings,
)
from hvd_cifar.launch.settings import HostSettings


class _BenchmarkOutput(Settings):
    json_file: LocalPath | None = Field(None, description="JSON file to write the result to.")


class BenchmarkStepSettings(StepOptions, _BenchmarkOutput):
    """How long a training step and its parts take: the step of `train` with the same settings."""

    batch_size: int = Field(
        DEFAULT_PER_RANK_BATCH_SIZE, gt=0, le=MOST_EXAMPLES, description="Examples a rank processes at a time."
    )
    steps: int = Field(10, gt=0, le=MOST_STEPS, description="Steps in one measurement.")
    repeats: int = Field(5, gt=0, le=MOST_STEPS, description="Measurements of each kind, after a warm-up measurement.")
    min_efficiency: Finite | None = Field(
        None,
        gt=0,
        le=1,
        description="End with exit code 1 where the scaling efficiency is lower than this fraction.",
    )


class BenchmarkAllreduceSettings(_BenchmarkOutput):
    """How long all-reduces of many sizes take."""

    min_bytes: Bytes = Field(
        4, ge=4, validate_default=True, description="Smallest message; K, M, G are powers of 1024."
    )
    max_bytes: Bytes = Field(2**28, ge=4, description="Largest message.")
    factor: int = Field(2, ge=2, le=2**40, description="Ratio of each size to the one before.")
    seconds: Finite = Field(0.3, gt=0, description="Approximate seconds per size.")
    iterations: int = Field(
        100, gt=0, le=MOST_STEPS, description="Maximum number of all-reduces in one measurement of a size."
    )
    repeats: int = Field(5, gt=0, le=MOST_STEPS, description="Measurements of each size.")

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
    output: LocalPath | None = Field(
        None, description="HTML file to write. [default: report.html in the first RUN_DIR]"
    )


class DoctorSettings(HostSettings):
    """What the doctor checks: hosts as for the launcher."""

    probe_timeout: Finite = Field(30, gt=0, le=86_400, description="Seconds that a host may take to answer.")
    job_timeout: Finite = Field(180, gt=0, le=86_400, description="Seconds after which the small job is ended.")
    as_json: bool = Field(
        False, description="Print facts and findings as JSON, not as a table.", json_schema_extra={"flags": ["--json"]}
    )


class DoctorJobSettings(Settings):
    """The command of the doctor's small job, as the doctor starts its ranks."""
