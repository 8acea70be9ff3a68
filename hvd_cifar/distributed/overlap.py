"""The time of a step whose all-reduces run beside its backward pass, and the fastest buckets. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from . import buckets

# Bytes of a bucket to choose from.
CANDIDATES = tuple(2**n for n in range(16, 25))
# Part of a step's time that buckets must save: measurements cannot resolve less.
LEAST_GAIN = 0.02


@dataclass(frozen=True)
class Backward:
    """A rank's computation, in seconds.

    Attributes:
        before: from the step's start to the start of the backward pass.
        ready: when each gradient is ready, from there, ascending.
        sizes: bytes of each, as it is sent.
    """

    before: float
    ready: tuple[float, ...]
    sizes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """From the step's start to the last gradient."""
        return self.before + self.ready[-1]


@dataclass(frozen=True)
class Link:
    """An all-reduce over the ranks, in seconds.

    Attributes:
        start: of an empty message.
        per_byte: of a byte.
        work_start, work_per_byte: the part of each in which the core works for the all-reduce and cannot compute. Only
            the rest can be hidden.
    """

    start: float
    per_byte: float
    work_start: float = 0.0
    work_per_byte: float = 0.0

    def seconds(self, size: int) -> float:
        """The time of one message."""
        return self.start + self.per_byte * size


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the predicted seconds to the last sum: as chosen, and in one message."""

    bucket_bytes: int | None
    seconds: float
    in_one_message: float


def end_of_messages(ready: Sequence[float], sizes: Sequence[int], seconds: Callable[[int], float]) -> float:
    """The time at which the last message is reduced, where all-reduces run beside the backward pass; in seconds.

    Horovod reduces together all messages that are ready when the all-reduce before has ended.

    Args:
        ready: when each message is ready, ascending, in seconds.
        sizes: bytes of each.
        seconds: a function from bytes to the seconds of their all-reduce.
    """
    now, sent = 0.0, 0
    while sent < len(sizes):
        now = max(now, ready[sent])
        upto = sent
        while upto < len(sizes) and ready[upto] <= now:
            upto += 1
        now += seconds(sum(sizes[sent:upto]))
        sent = upto
    return now


def seconds_with(backward: Backward, link: Link, bucket_bytes: int | None) -> float:
    """Seconds from a step's start to its last sum. `bucket_bytes`: the size of a bucket; None: one message."""
    whole = sum(backward.sizes)
    if bucket_bytes is None:
        return backward.seconds + link.seconds(whole)
    planned = buckets.plan(backward.sizes, bucket_bytes)
    # The core's work for all-reduces delays the computation.
    work = len(planned) * link.work_start + link.work_per_byte * whole
    stretch = 1 + work / max(backward.ready[-1], 1e-9)
    ready = [backward.before + backward.ready[bucket[-1]] * stretch for bucket in planned]
    sizes = [sum(backward.sizes[i] for i in bucket) for bucket in planned]
    return end_of_messages(ready, sizes, link.seconds)


def choose(backward: Backward, link: Link, candidates: Sequence[int] = CANDIDATES, always: bool = False) -> Choice:
    """The fastest bucket size; None where it saves less than `LEAST_GAIN`, unless `always`."""
    in_one = seconds_with(backward, link, None)
    seconds, size = min((seconds_with(backward, link, size), -size) for size in candidates)
    if not always and seconds > in_one * (1 - LEAST_GAIN):
        return Choice(None, in_one, in_one)
    return Choice(-size, seconds, in_one)
