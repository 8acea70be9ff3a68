"""The results of the benchmarks, as in their JSON files. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

from hvd_cifar.errors import UserError
from hvd_cifar.files import replace_text
from hvd_cifar.reporting import provenance
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.world import World, versions


@dataclass(frozen=True)
class Estimate:
    """The mean of n repeats, and its standard error: None for one repeat."""

    mean: float
    standard_error: float | None
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From the values of all repeats."""
        n = len(values)
        error = statistics.stdev(values) / math.sqrt(n) if n > 1 else None
        return cls(mean=statistics.fmean(values), standard_error=error, n=n)


@dataclass(frozen=True)
class Facts:
    """Where and when a result was measured. processor: rank 0's GPU or CPU; cores: that it may use."""

    date: str
    command: str
    git_commit: str | None
    versions: dict[str, str]
    ranks: str
    processor: str
    cores: int
    hosts: list[str]  # by rank

    @classmethod
    def of(cls, world: World) -> Facts:
        """Of this rank's job."""
        gpu = re.search(r"^GPU \d+: (.*?) \(UUID", devices.list_gpus(), re.MULTILINE) if "GPU" in world.device else None
        return cls(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=provenance.command(),
            git_commit=provenance.git_commit() if world.is_root else None,
            versions=versions(),
            ranks=world.describe(),
            processor=gpu[1] if gpu else devices.processor(Path("/proc/cpuinfo"))[0],
            cores=len(os.sched_getaffinity(0)),
            hosts=[rank.host for rank in world.ranks],
        )


@dataclass(frozen=True)
class StepResult:
    """Of `benchmark step`.

    images_per_second_alone: of as many processes that do not communicate. efficiency: the ratio of both, by repeat.
    step_seconds: computation and all-reduce, as in training; compute_seconds: without communication.
    communication_seconds: the all-reduce of the gradients by itself; None: one rank.
    fed_seconds: the step, fed by the pipeline; input_cost: that over step_seconds, minus 1, by repeat.
    compute_by_rank: mean seconds of the step without communication.
    bucket_bytes: None: gradients leave after the backward pass.
    """

    facts: Facts
    model: str
    precision: str
    dataset: str
    per_rank_batch_size: int
    compression: str
    bucket_bytes: int | None
    steps: int
    images_per_second: Estimate
    images_per_second_alone: Estimate
    efficiency: Estimate
    step_seconds: Estimate
    compute_seconds: Estimate
    communication_seconds: Estimate | None
    fed_seconds: Estimate
    input_cost: Estimate
    compute_by_rank: list[float]


@dataclass(frozen=True)
class AllreducePoint:
    """All-reduces of one size. Bandwidths are in bytes a second; wrong_values: over all ranks."""

    bytes: int
    iterations: int
    seconds: Estimate
    algorithm_bandwidth: float
    bus_bandwidth: float  # the same, times 2 (p - 1) / p
    wrong_values: int


@dataclass(frozen=True)
class AllreduceResult:
    """Of `benchmark allreduce`."""

    facts: Facts
    points: list[AllreducePoint]


def write(path: Path, result: StepResult | AllreduceResult) -> None:
    """Write a result as JSON. Raises UserError where it cannot be written."""
    try:
        replace_text(path, json.dumps(asdict(result), indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None
