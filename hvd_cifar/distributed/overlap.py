"""The time of a step whose all-reduces run beside its backward pass, and the fastest buckets. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.distributed import buckets

MOST_BUCKETS = 32
MOMENTS = 256  # of a backward pass; gradients of the same moment share a bucket
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

    @classmethod
    def by_bytes(cls, sizes: Sequence[int], seconds: float) -> Backward:
        """One of `seconds` in which each gradient is ready after its part of the bytes."""
        return cls(0.0, tuple(seconds * done / sum(sizes) for done in itertools.accumulate(sizes)), tuple(sizes))

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

    bucket_bytes: buckets.BucketBytes
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


def seconds_with(backward: Backward, link: Link, bucket_bytes: buckets.BucketBytes) -> float:
    """Seconds from a step's start to its last sum, with buckets of these bytes (see `buckets.plan`)."""
    whole = sum(backward.sizes)
    if bucket_bytes is None:
        return backward.seconds + link.seconds(whole)
    planned = buckets.plan(backward.sizes, bucket_bytes)
    stretch = _stretch(backward, link, len(planned))
    ready = [backward.before + backward.ready[bucket[-1]] * stretch for bucket in planned]
    sizes = [sum(backward.sizes[i] for i in bucket) for bucket in planned]
    return end_of_messages(ready, sizes, link.seconds)


def _stretch(backward: Backward, link: Link, count: int) -> float:
    """By what factor the core's work for all-reduces, in `count` buckets, delays the backward pass."""
    work = count * link.work_start + link.work_per_byte * sum(backward.sizes)
    return 1 + work / max(backward.ready[-1], 1e-9)


def choose(backward: Backward, link: Link, given: int | None = None, always: bool = False) -> Choice:
    """The fastest buckets, or those of `given` bytes; None where they save less than `LEAST_GAIN`, unless `always`."""
    in_one = seconds_with(backward, link, None)
    sizes = given or fastest_sizes(backward, link)
    seconds = seconds_with(backward, link, sizes)
    if not always and seconds > in_one * (1 - LEAST_GAIN):
        return Choice(None, in_one, in_one)
    return Choice(sizes, seconds, in_one)


def fastest_sizes(backward: Backward, link: Link) -> tuple[int, ...] | None:
    """Bytes of all buckets but the last, such that the last sum is there first; None for a single gradient.

    Every division into consecutive gradients is considered (dynamic programming over the end of the bucket before), in
    two buckets and more, until more of them are no faster. The last buckets come out small: nothing hides them.
    """
    moment = np.floor(np.array(backward.ready) / max(backward.ready[-1], 1e-9) * MOMENTS)
    ends = [0, *(np.flatnonzero(np.diff(moment)) + 1).tolist(), len(moment)]  # where a bucket may begin or end
    if len(ends) == 2:  # all are ready at the same time
        ends = list(range(len(moment) + 1))
    held = np.concatenate([[0], np.cumsum(backward.sizes)])[ends]
    ready = np.array([0.0, *backward.ready])[ends]
    messages = link.start + link.per_byte * (held - held[:, None]).astype(float)  # [from, to], seconds
    messages[np.tril_indices(len(ends))] = np.inf
    fastest: tuple[float, list[int]] = (np.inf, [])
    for count in range(2, min(MOST_BUCKETS, len(ends) - 1) + 1):
        found = _fastest_of(count, backward.before + ready * _stretch(backward, link, count), messages)
        if found[0] < fastest[0]:
            fastest = found
        elif count > len(fastest[1]) + 3:
            break
    return tuple(np.diff(held[[0, *fastest[1]]]).tolist()) or None


def _fastest_of(count: int, ready: NDArray[Any], messages: NDArray[Any]) -> tuple[float, list[int]]:
    """The earliest end of the last of `count` buckets, in seconds, and where all but the last of them end.

    Args:
        ready: when the gradients before each place are ready, in seconds: [places].
        messages: seconds of the all-reduce from one place to another: [places, places].
    """
    ends = np.where(np.arange(len(ready)), np.inf, 0.0)  # of no bucket
    came_from = []
    for _ in range(count):
        through = np.maximum(ends[:, None], ready) + messages
        came_from.append(through.argmin(axis=0))
        ends = through.min(axis=0)
    place, places = len(ready) - 1, []
    for before in came_from[:0:-1]:
        place = int(before[place])
        places.append(place)
    return float(ends[-1]), places[::-1]
