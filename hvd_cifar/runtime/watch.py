"""The watchdog of a rank: a thread that notices a lack of progress, finds the rank that causes it, and ends the run.

Python's main thread may be inside a collective for ever, so nothing here needs that thread or Horovod. Ranks ask each
other over `channel`; a process that is stopped, or whose Python is frozen, does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO, TypeVar

from hvd_cifar.distributed.trail import note, recent
from hvd_cifar.errors import STALLED
from hvd_cifar.files import complain
from hvd_cifar.runtime import channel
from hvd_cifar.runtime.environment import launched_rank
from hvd_cifar.runtime.inspect_process import state_of
from hvd_cifar.runtime.stalls import FACTOR, FLOOR, PATIENCE, Lost, Status, judge

TICK = 0.5  # s between looks, at most
GAP = 3.0  # s between two ticks: the process was suspended, as on a laptop that sleeps, so the time does not count
BETWEEN_LOOKS = 3.0  # s, while no progress is made
TRIES = 5  # to reach another rank at the start
LEAD = 0.2  # s by which a rank asks later than the one before it (and a tick later than rank 0), so that one asks first
DEFERENCE = 8.0  # s for which a rank does not ask after a lower rank has asked it: longer than two looks
GLOO_SECONDS = 86_400  # Gloo's own time-out, 30 s by default, would blame a rank that only waits
RECENT = 100  # durations of a phase that are remembered
STALLS = "stalls"  # the folder of stacks in the run directory
IDLE = "idle"  # the phase in which a rank may take any time

T = TypeVar("T")
Answers = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """Where a rank's watchdog answers."""

    host: str
    pid: int
    address: channel.Address


class Watch:
    """This rank's phases, as its main thread marks them, and the thread that looks at them.

    Attributes:
        is_alone: whether it judges by this rank alone, after more time, since others cannot be asked.
        run_dir: for stacks, where the host has it.
        waits_in_step: whether the step waits for other ranks.
    """

    _current: Watch | None = None  # of this process
    _address: channel.Address | None = None  # where this process answers

    def __init__(self, seconds: float | None) -> None:
        """Begin at start-up, and end the watch of an earlier run of this process.

        Args:
            seconds: the time-out; None: learned from the phases' durations; 0: the watch does nothing.
        """
        self.is_on = seconds != 0
        self.rank = launched_rank() or 0
        self.run_dir: Path | None = None
        self.waits_in_step: Callable[[], bool] = lambda: False
        self.is_alone = True  # until `join`
        self._given = seconds
        self._durations: dict[str, deque[float]] = {}
        self._phase, self._step, self._since = "start-up", 0, time.monotonic()
        self._position = 0  # phases begun: the same on all ranks that are at the same place
        self._spent = 0.0  # s in this phase before a phase within it
        self._peers: Sequence[Peer] = ()
        self._next_look = 0.0
        self._main = threading.get_ident()
        Watch._current = self if self.is_on else None
        if self.is_on:
            os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
            threading.Thread(target=self._run, args=[min(TICK, (seconds or FLOOR) / 4)], daemon=True).start()

    # Phases.

    def mark(self, phase: str, step: int | None = None) -> None:
        """A phase begins: this rank makes progress."""
        self._leave()
        self._step = self._step if step is None else step
        self._begin(phase)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within another one, whose duration is that of its pieces. An error leaves it also."""
        outer, spent = self._phase, self._spent + self._idle
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

    @classmethod
    def sign_of_life(cls) -> None:
        """This process makes progress within a phase of unknown length, such as a download."""
        if watch := cls._current:
            watch._spent, watch._since = watch._spent + watch._idle, time.monotonic()

    def _begin(self, phase: str, spent: float = 0.0) -> None:
        self._phase, self._since, self._spent = phase, time.monotonic(), spent
        self._position += 1
        note(f"{phase}, step {self._step}")

    def _leave(self) -> None:
        self._durations.setdefault(self._phase, deque(maxlen=RECENT)).append(self._spent + self._idle)

    @property
    def _idle(self) -> float:
        """Seconds since this rank made progress."""
        return time.monotonic() - self._since

    def _limit(self, phase: str) -> float:
        """Seconds without progress in this phase after which the ranks look for one that hangs."""
        seen = list(self._durations.get(phase, ()))
        if not seen:
            return FACTOR * (self._given or FLOOR)  # the first time compiles
        return self._given or max(FLOOR, FACTOR * max(seen[1:] or seen))

    # Other ranks.

    def listen(self, rank: int, one_host: bool) -> Peer:
        """Answer other ranks from now on, once Horovod has started; return where."""
        self.rank = rank
        address = channel.address_here(one_host), 0
        if self.is_on:
            if Watch._address is None:
                Watch._address = channel.listen(address[0], _answer)
                atexit.register(_mark_shutdown)  # after Horovod's own entry, and so called before it
            address = Watch._address
        return Peer(socket.gethostname(), os.getpid(), address)

    def join(self, peers: Sequence[Peer]) -> bool:
        """Tell the watch where all ranks answer, by rank; return whether the next rank does."""
        self._peers = peers
        self.is_alone = False
        following = (self.rank + 1) % len(peers)
        return not self.is_on or any(not self._ask_all("hello", [following])[1] for _ in range(TRIES))

    def _ask_all(self, question: str, ranks: Collection[int]) -> tuple[Answers, dict[int, str]]:
        """Ask other ranks at once: the answers, and the reasons where there is none."""
        answers: Answers = {}
        absent: dict[int, str] = {}

        def ask(rank: int) -> None:
            peer = self._peers[rank]
            try:
                answers[rank] = channel.ask(peer.address, f"{question} {self.rank}")
            except channel.NoAnswer as failure:
                is_here = peer.address[0] == self._peers[self.rank].address[0]  # cloned hosts may share a name
                absent[rank] = state_of(peer.pid) if is_here and str(failure) == channel.SILENT else str(failure)

        for thread in [channel.in_thread(ask, rank) for rank in ranks if rank != self.rank]:
            if thread:
                thread.join()
        return answers, absent

    def answer(self, question: str) -> Mapping[str, Any]:
        """This rank's status. Asked for its stacks it also writes them."""
        what, by = question.split()
        if what == "stacks":
            self._save_stacks()
        elif what == "look" and int(by) < self.rank:
            self._next_look = time.monotonic() + DEFERENCE
        return asdict(self._status())

    def _status(self) -> Status:
        frame, waits = sys._current_frames().get(self._main), self._phase.startswith("step") and self.waits_in_step()
        while frame is not None:
            waits |= frame.f_globals.get("__name__", "").startswith("horovod.")
            frame = frame.f_back
        place = (self._step, self._phase, self._position, self._idle)
        return Status(self.rank, socket.gethostname(), *place, waits)

    # The thread.

    def _run(self, tick: float) -> None:
        seen = time.monotonic()
        while Watch._current is self:
            time.sleep(tick)
            now = time.monotonic()
            if now - seen > GAP:
                self._since += now - seen
            limit = self._limit(self._phase) * (PATIENCE if self.is_alone else 1)
            lead = (TICK + min(self.rank, 10) * LEAD) * (self.rank > 0)
            if self._phase != IDLE and self._idle > limit + lead and now > self._next_look:
                self._look(limit)
                self._next_look = max(self._next_look, time.monotonic() + BETWEEN_LOOKS)
            seen = time.monotonic()

    def _look(self, limit: float) -> None:
        """No progress for this long: find out why, and end the run if it cannot go on."""
        position, others = self._position, range(0 if self.is_alone else len(self._peers))
        answers, absent = self._ask_all("look", others)
        if absent and self._position == position:  # again: an answer may be late on a busy machine
            late, absent = self._ask_all("look", absent)
            answers |= late
        if self._phase == "shutdown":  # a rank whose process has ended is not lost
            absent = {rank: reason for rank, reason in absent.items() if reason != channel.GONE}
            if not absent:
                return
        statuses = [self._status(), *(Status(**answer) for answer in answers.values())]
        if self._position != position:
            return
        lost = judge(statuses, {rank: (self._peers[rank].host, reason) for rank, reason in absent.items()}, limit)
        if lost is not None:
            self._end(lost, answers, limit)

    def _end(self, lost: Sequence[Lost], others: Collection[int], seconds: float) -> None:
        """Save stacks, name the ranks that are lost, and end this process, and so the job."""
        self._save_stacks()
        self._ask_all("stacks", others)
        place = str(self.run_dir / STALLS) if self.run_dir and self.run_dir.is_dir() else "above"
        ending = f"the run ends (exit code {STALLED}); stacks of all ranks that answer: {place}"
        complain(f"no progress for {seconds:.0f} s; {ending}")
        # Last: the launcher keeps the last line of each start.
        for one in lost:
            complain(str(one))
        if not lost:
            who = f"rank {self.rank} waits for others, which it cannot ask," if self.is_alone else "all ranks wait"
            what = "" if self.is_alone else " for each other, or for the network"
            complain(f"{who} at step {self._step} ({self._phase}){what}")
        os._exit(STALLED)

    def _save_stacks(self) -> None:
        """Write what this rank does to the run directory, or to stderr where this host has no such folder."""
        here = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}"
        text = f"{here}: step {self._step} ({self._phase}) for {self._idle:.1f} s\nlast phases and collectives:\n"
        with contextlib.suppress(OSError), self._stacks_file() as file:
            file.write(text + "".join(f"{line}\n" for line in recent()))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)

    def _stacks_file(self) -> TextIO:
        if self.run_dir is not None and self.run_dir.is_dir():
            with contextlib.suppress(OSError):
                (folder := self.run_dir / STALLS).mkdir(exist_ok=True)
                return (folder / f"step-{self._step}-rank-{self.rank}.txt").open("w")
        return os.fdopen(os.dup(2), "w")


def _answer(question: str) -> Mapping[str, Any]:
    if Watch._current is None:
        raise ConnectionError
    return Watch._current.answer(question)


def _mark_shutdown() -> None:
    if Watch._current is not None:
        Watch._current.mark("shutdown")
