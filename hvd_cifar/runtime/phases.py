"""What a rank does, and since when: its phases, and how long each may last."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

from hvd_cifar.distributed.trail import note
from hvd_cifar.runtime.stalls import FACTOR, FLOOR

T = TypeVar("T")

RECENT = 100  # durations of a phase that are remembered


class Phases:
    """The phases of a rank, as its main thread marks them, and the time-outs that follow from their durations."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: the user's time-out; None: it is learned from the durations."""
        self._given = seconds
        self._durations: dict[str, deque[float]] = {}
        self._phase, self._step, self._since = "start-up", 0, time.monotonic()
        self._position = 0  # phases begun: the same on all ranks that are at the same place
        self._spent = 0.0  # s in this phase before a phase within it

    def mark(self, phase: str, step: int | None = None) -> None:
        """A phase begins: this rank makes progress."""
        self._leave()
        self._step = self._step if step is None else step
        self._begin(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within another one, whose duration is that of its pieces. An error leaves it also."""
        outer, spent = self._phase, self._elapsed()
        self._begin(name)
        try:
            yield
        finally:
            self._leave()
            self._begin(outer, spent)

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items; waiting for one is a phase."""
        iterator = iter(items)
        while True:
            self.mark(phase)
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item

    def _limit(self, phase: str) -> float:
        """Seconds without progress in this phase after which the ranks look for one that hangs."""
        seen = list(self._durations.get(phase, ()))
        if not seen:
            return FACTOR * (self._given or FLOOR)  # the first time compiles
        return self._given or max(FLOOR, FACTOR * max(seen[1:] or seen))

    def _begin(self, phase: str, spent: float = 0.0) -> None:
        self._phase, self._since, self._spent = phase, time.monotonic(), spent
        self._position += 1
        note(f"{phase}, step {self._step}")

    def _leave(self) -> None:
        self._durations.setdefault(self._phase, deque(maxlen=RECENT)).append(self._elapsed())

    def _elapsed(self) -> float:
        return self._spent + self._idle

    @property
    def _idle(self) -> float:
        """Seconds since this rank made progress."""
        return time.monotonic() - self._since
