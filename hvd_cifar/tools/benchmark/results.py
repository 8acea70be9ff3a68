"""The results of the benchmarks, as in their JSON files. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import errno
import math
import secrets
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hvd_cifar.errors import UserError
from hvd_cifar.files import PART, can_be_replaced, replace_text


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")  # files of earlier versions have other fields


class Estimate(_Result):
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


class Facts(_Result):
    """Where and when a result was measured."""

    date: str
    command: str
    git_commit: str | None
    versions: dict[str, str]
    processor: str  # of rank 0's host: its GPU, or its CPU
    cores: int  # that rank 0 may use
    hosts: list[str]  # names, by rank; two hosts may share one
    local_ranks: list[int]  # by rank; there are as many hosts as zeros
    device: str
    threads: int
    controller: str
    algorithm: str  # of the all-reduce
    transport: str


class WorldResult(_Result):
    """The step on the first `ranks` ranks of the job."""

    ranks: int
    images_per_second: Estimate
    images_per_second_alone: Estimate  # of as many processes that do not communicate
    efficiency: Estimate  # the first over the second, by repeat
    step_seconds: Estimate  # computation and all-reduce together, as in training
    compute_seconds: Estimate  # the same step without communication
    lockstep_seconds: Estimate  # the same, if each step had to wait for its slowest rank
    communication_seconds: Estimate | None  # the all-reduce of the gradients by itself; None: nothing to reduce
    fed_seconds: Estimate  # the step, fed by the pipeline
    input_cost: Estimate  # fed over not fed, minus 1, by repeat
    compute_by_rank: list[float]  # mean seconds of the step without communication, by rank

    @property
    def slowest(self) -> int:
        """The rank whose computation of a step takes longest, without communication."""
        return self.compute_by_rank.index(max(self.compute_by_rank))

    @property
    def slowest_behind(self) -> float:
        """Its distance from the median rank, as a fraction; of two middle ranks, the faster one's."""
        return max(self.compute_by_rank) / statistics.median_low(self.compute_by_rank) - 1


class Gradient(_Result):
    """A variable's gradient; gradients are in the order of the backward pass."""

    name: str
    bytes: int  # as it is sent
    ready_seconds: float  # after the start of the backward pass


class Phases(_Result):
    """Parts of the slowest rank's step without communication, on all ranks at once."""

    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    gradients: list[Gradient]


class StepResult(_Result):
    """Of `benchmark step`."""

    benchmark: Literal["step"] = "step"
    facts: Facts
    model: str
    precision: str
    dataset: str
    per_rank_batch_size: int
    compression: str
    bucket_bytes: int | None  # None: gradients leave after the backward pass
    steps: int
    worlds: list[WorldResult]
    phases: Phases


class AllreducePoint(_Result):
    """All-reduces of one size over the first `ranks` ranks."""

    ranks: int
    bytes: int
    iterations: int
    seconds: Estimate
    algorithm_bandwidth: float  # bytes a second
    bus_bandwidth: float  # the same, times 2 (p - 1) / p
    processor_seconds: float  # of the rank that works longest for one; it includes waiting, where ranks poll
    wrong_values: int  # over all ranks


class AllreduceResult(_Result):
    """Of `benchmark allreduce`."""

    benchmark: Literal["allreduce"] = "allreduce"
    facts: Facts
    points: list[AllreducePoint]


def write(path: Path, result: _Result) -> None:
    """Write a result as JSON. Raises UserError where it cannot be written."""
    try:
        replace_text(path, result.model_dump_json(indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None


def check_writable(path: Path | None) -> None:
    """UserError where a file could not be written; None: there is none to write."""
    if path is None:
        return
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")
    try:
        if not can_be_replaced(path):
            raise OSError(errno.EINVAL, "it is no regular file")
        part.open("xb").close()
        part.unlink()
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give another file") from None
