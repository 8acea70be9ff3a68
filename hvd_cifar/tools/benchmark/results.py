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

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, computed_field

from hvd_cifar.config import Overlap
from hvd_cifar.errors import UserError
from hvd_cifar.files import PART, can_be_replaced, replace_text
from hvd_cifar.tools.benchmark.fits import Fit, Layout, Point


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
    algorithm: str = ""  # of the all-reduce; "" in files of older versions
    transport: str = ""


class SlowestRank(_Result):
    """The rank whose computation of a step takes longest, without communication."""

    rank: int
    host: str
    behind_median: float  # as a fraction of the median rank's time; of two middle ranks, the faster one's


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
    compute_seconds_by_rank: list[float]
    input_seconds_by_rank: list[float]
    step_seconds_by_rank: list[float] = []  # as compute_seconds_by_rank: means; empty in files of older versions
    communication_seconds_by_rank: list[float] = []  # and where there is nothing to reduce
    slowest: SlowestRank


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


class Memory(_Result):
    """One rank's process: its resident memory (RSS), and its proportional set size (PSS; None: not known)."""

    resident: int
    proportional: int | None


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
    overlap: Overlap = "auto"  # the option
    given_bucket_bytes: int | None = None  # the option; `bucket_bytes` is also of buckets that were chosen
    messages: list[int]  # without buckets: bytes of the messages, in order
    steps: int
    worlds: list[WorldResult]
    phases: Phases
    memory_by_rank: list[Memory]
    waiting_cpu: float | None  # part of a core that a rank uses while it waits for others; None: none waited


class EmulatedWorld(_Result):
    """The step with a sleep for its computation on the first `ranks` ranks; times are the slowest rank's.

    An estimate is the mean over the repeats of the median of a repeat's steps.
    """

    ranks: int
    step_seconds: Estimate
    alone_seconds: Estimate  # without communication: the sleep and the update
    rest_seconds: Estimate  # the first minus the second: what ranks cost each other
    message_seconds: Estimate  # the all-reduce of the gradients alone, through Horovod
    value_seconds: Estimate  # the all-reduce of the loss alone: the latency of a collective
    ring_seconds: Estimate | None  # an all-reduce of the gradients' size, through MPI directly
    step_processor: Estimate  # seconds of a rank, all threads
    alone_processor: Estimate
    sent_bytes: float  # by the host that sends most, over its network cards, a step
    sent_packets: float


class EmulatedResult(_Result):
    """Of `benchmark step --emulate-compute`."""

    benchmark: Literal["emulated step"] = "emulated step"
    facts: Facts
    model: str
    gradients: list[int]  # bytes, in the order of the backward pass
    bucket_bytes: int | None
    emulated_seconds: float
    steps: int
    worlds: list[EmulatedWorld]
    memory_by_rank: list[Memory]


class AllreducePoint(_Result):
    """All-reduces of one size over the first `ranks` ranks; "copy" is a copy in memory by each of them."""

    way: Literal["horovod", "mpi", "copy"]
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
    fits: dict[str, Fit]  # by way; "processor": of the processor's time for Horovod's
    skipped: dict[str, str]  # ways that were not available, and why


def points_by_way(
    points: Sequence[AllreducePoint], local_ranks: Sequence[int], most_ranks: int | None = None
) -> dict[str, list[Point]]:
    """The measurements on up to `most_ranks` ranks, by way, for a fit. `local_ranks`: by rank."""
    found: dict[str, list[Point]] = {}
    for p in points:
        if most_ranks is None or p.ranks <= most_ranks:
            layout = Layout.of(local_ranks[: p.ranks])
            found.setdefault(p.way, []).append(Point(layout, p.bytes, p.seconds.mean))
            if p.way == "horovod":
                found.setdefault("processor", []).append(Point(layout, p.bytes, p.processor_seconds))
    return found


FeedWay = Literal["split", "drawn", "sharded"]


class Seen(_Result):
    """How often one epoch used the examples of the training set; counts of examples."""

    never: int
    once: int
    more: int
    by_ranks: list[int]  # at index k: the examples that k different ranks used
    uses_by_rank: list[int]
    different_by_rank: list[int]


class FeedResult(_Result):
    """One way to give the ranks their batches: epochs without training."""

    way: FeedWay
    images_per_second: Estimate  # over all ranks, by the slowest rank's time
    processor_seconds: Estimate  # of all ranks, for 1,000 images over all ranks
    processor_seconds_by_rank: list[Estimate]  # of these 1,000 images
    held_by_rank: list[int]  # bytes of images: a batch in use, and a full buffer
    epochs: list[Seen]
    ranks_of_first: list[list[int]]  # of the first examples of the set: the ranks that used each, in the last epoch


class InputResult(_Result):
    """Of `benchmark input`."""

    benchmark: Literal["input"] = "input"
    facts: Facts
    model: str
    dataset: str
    examples: int  # in the training set
    per_rank_batch_size: int
    image_shape: list[int]  # of what the net sees, as float32
    memory_by_rank: list[Memory]  # of whole processes, after all ways
    ways: list[FeedResult]


class Prediction(_Result):
    """Scaling efficiency on `ranks` ranks of `hosts` hosts, from measurements on at most `measured_on` ranks."""

    ranks: int
    hosts: int
    measured_on: int
    communication_seconds: float  # of all gradients in one message
    bucket_bytes: int | None  # None: one message after the backward pass
    step_seconds: float
    efficiency: float
    efficiency_in_one_message: float
    measured: float | None = None
    measured_standard_error: float | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def error(self) -> float | None:
        """efficiency / measured - 1."""
        return None if self.measured is None else self.efficiency / self.measured - 1


class PredictResult(_Result):
    """Of `benchmark predict`."""

    benchmark: Literal["predict"] = "predict"
    command: str
    step: StepResult | EmulatedResult  # the two results that it is made from
    allreduce: AllreduceResult
    local_ranks: int  # of each host, where there are more hosts than one
    link_fit: Fit  # of the all-reduces, with the link's numbers where they are given
    checks: list[Prediction]  # of what was measured: from measurements on as many ranks, and on the fewest alone
    predictions: list[Prediction]  # with `link_fit`


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
