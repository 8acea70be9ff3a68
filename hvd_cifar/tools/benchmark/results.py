"""The results of the benchmarks, as in their JSON files. Times are in seconds, sizes in bytes."""

from __future__ import annotations

import json
import math
import os
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from hvd_cifar.errors import UserError
from hvd_cifar.files import PART, can_be_replaced, replace_text


class _Result(BaseModel):
    model_config = ConfigDict(frozen=True)


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


class RankResult(_Result):
    """Mean times of one rank of a job."""

    rank: int
    host: str
    compute_seconds: float
    communication_seconds: float | None  # None: nothing to reduce
    step_seconds: float
    input_seconds: float


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
    input_seconds: Estimate  # the pipeline by itself, for one batch
    fed_seconds: Estimate  # the step, fed by the pipeline
    input_cost: Estimate  # fed over not fed, minus 1, by repeat
    by_rank: list[RankResult]

    @property
    def slowest(self) -> RankResult:
        """The rank whose computation of a step takes longest, without communication."""
        return max(self.by_rank, key=lambda of_rank: of_rank.compute_seconds)

    @property
    def slowest_behind(self) -> float:
        """Its distance from the median rank, as a fraction; of two middle ranks, the faster one's."""
        return self.slowest.compute_seconds / statistics.median_low(r.compute_seconds for r in self.by_rank) - 1


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

    way: Literal["horovod", "mpi"]
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
    skipped: dict[str, str]  # ways that were not available, and why


def write(path: Path, result: _Result) -> None:
    """Write a result as JSON. Raises UserError where it cannot be written."""
    try:
        replace_text(path, json.dumps(result.model_dump(mode="json"), indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"cannot write {path}: {failure.strerror}; give a file that can be written") from None


def read(kind: Any, path: Path, option: str) -> Any:
    """Read a result that `write` wrote.

    Args:
        kind: a class of results, or a union of them.
        option: that names the file.

    Raises:
        UserError: where the file holds no such result.
    """
    kinds = getattr(kind, "__args__", (kind,))
    known = dict.fromkeys(f"`benchmark {kind.model_fields['benchmark'].default}`" for kind in kinds)
    name = " or ".join(known)
    try:
        return TypeAdapter(kind).validate_json(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise UserError(f"{option} {path}: {failure.strerror}; give the --json file of {name}") from None
    except (ValidationError, UnicodeDecodeError):
        raise UserError(f"{option} {path}: is no result of {name}; give its --json file") from None


def check_writable(*paths: Path | None, inputs: Sequence[Path | None] = ()) -> None:
    """UserError where a file cannot be written, or would overwrite another one or an input."""
    seen = {path.resolve() for path in inputs if path is not None}
    for path in paths:
        if path is None:
            continue
        if path.resolve() in seen:
            raise UserError(f"{path} is given twice, and one file would be written over the other; give two names")
        seen.add(path.resolve())
        what = f"there is no folder {path.parent}" if not os.path.isdir(path.parent) else ""
        if os.path.isdir(path):
            what = "is a folder"
        elif not what and not can_be_replaced(path):
            what = "is no regular file"
        elif not what:
            try:
                with tempfile.TemporaryFile(dir=path.parent):
                    for name in (path.name, path.name + PART):
                        with suppress(FileNotFoundError):
                            path.with_name(name).open("r+b").close()
            except OSError as failure:
                what = str(failure.strerror)
        if what:
            raise UserError(f"cannot write {path}: {what}; give another file")
