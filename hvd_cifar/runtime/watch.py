"""The watchdog of a rank: a thread that notices a lack of progress, finds the rank that causes it, and ends the run.

Python's main thread may be inside a collective for ever, so nothing here needs that thread or Horovod. Ranks ask each
other over TCP: a line of text, and a line of JSON in answer. A process that is stopped, or whose Python is frozen, does
not answer. Like MPI's ports these are open to the job's network: whoever reaches one may read a rank's status.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hvd_cifar.distributed.errors import note, recent
from hvd_cifar.errors import STALLED
from hvd_cifar.files import complain
from hvd_cifar.runtime.environment import address_here, launched_rank

FLOOR = 60.0  # s: a shorter time-out would take a busy machine for a hang
FACTOR = 10.0  # longest recent durations in a time-out; or floors, for a phase that has not been seen yet
PATIENCE = 5.0  # time-outs after which a rank that cannot ask the others, as before Horovod starts, ends the run
SLACK = 0.9  # part of the time-out after which a rank is late: ranks do not begin a phase at exactly the same time
TICK = 0.5  # s between looks, at most
GAP = 3.0  # s between two ticks: the process was suspended, as on a laptop that sleeps, so the time does not count
BETWEEN_LOOKS = 3.0  # s, while no progress is made
DEFERENCE = 12.0  # s for which a rank does not ask after a lower rank has asked it: longer than a look
ANSWER_SECONDS = 4.0  # enough on a busy machine
GLOO_SECONDS = 86_400  # Gloo's own time-out, 30 s by default, would blame a rank that only waits
STALLS = "stalls"  # the folder of stacks in the run directory
IDLE = "idle"  # the phase in which a rank may take any time
# Why a rank does not answer.
GONE = "its process has ended"
SILENT = "it does not answer"
UNREACHABLE = "its host cannot be reached"
FAILURES = (OSError, asyncio.TimeoutError, ValueError, TypeError)  # the last two: it says nothing, or is no rank

T = TypeVar("T")


class Peer(NamedTuple):
    """Where a rank's watchdog answers."""

    host: str
    address: tuple[str, int]


class Status(NamedTuple):
    """What a rank reports about itself."""

    rank: int
    host: str
    step: int  # that it makes
    phase: str
    position: int  # phases begun: the same on all ranks that are at the same place
    idle: float  # s since it began the phase, or gave a sign of life in it
    waits: bool  # for other ranks, in a collective


# The line that names a rank which the run cannot go on with. The launcher reads it.
HANGS = re.compile(r"\brank (?P<rank>\d+) on (?P<host>\S+) hangs at step (\d+) \(([^)\n]*)\): ([^\n]*)")


def lost_ranks(text: str) -> dict[int, str]:
    """Rank and host of those that lines of a job's stderr name as lost."""
    return {int(line["rank"]): line["host"] for line in HANGS.finditer(text)}


def judge(
    statuses: Sequence[Status], absent: Mapping[int, tuple[str, str]], limit: float
) -> list[tuple[Status, str]] | None:
    """The ranks that hold up the others, and why; empty where all are stuck and none is to blame; None: wait.

    `statuses` are of the ranks that answer, at least one; `absent` has host and reason of those that do not; `limit` is
    the time-out (s) of the rank that asks.
    """
    behind = min(statuses, key=lambda s: s.position)
    if absent:  # at the latest they are where the last one of the others is
        return [(behind._replace(rank=rank, host=host), why) for rank, (host, why) in sorted(absent.items())]
    here = [s for s in statuses if s.position == behind.position]
    # Ranks that are further wait for these. Of these, ranks inside a collective wait for the rest.
    working = [s for s in here if not s.waits]
    suspects = working or (here if len(here) < len(statuses) else [])
    # Without one all wait in the same place: for the network, or for different collectives.
    if min(s.idle for s in suspects or statuses) < SLACK * limit:
        return None
    reason = "the other ranks wait for it" if working else "it waits for other ranks elsewhere"
    if len(suspects) == len(statuses):
        reason = "no progress"
    return [(s, reason) for s in suspects]


class Watch:
    """This rank's phases, as its main thread marks them, and the thread that looks at them.

    Attributes:
        peers: where all ranks answer, by rank; without them the rank judges alone, after more time.
        run_dir: for stacks, where the host has it.
        waits_in_step: whether the step waits for other ranks.
    """

    _current: Watch | None = None  # of this process

    def __init__(self, seconds: float | None) -> None:
        """Begin at start-up, and end the watch of an earlier run of this process.

        `seconds`: the time-out; None: learned from the phases' durations; 0: the watch does nothing.
        """
        self.is_on = seconds != 0
        self.rank = launched_rank() or 0
        self.run_dir: Path | None = None
        self.waits_in_step: Callable[[], bool] = lambda: False
        self.peers: Sequence[Peer] = ()
        self._given = seconds
        self._durations: dict[str, deque[float]] = {}
        self._phase, self._step, self._since = "start-up", 0, time.monotonic()
        self._position = 0
        self._spent = 0.0  # s in this phase before a phase within it
        self._next_look = 0.0
        self._server: asyncio.Server | None = None
        self._main = threading.get_ident()
        Watch._current = self if self.is_on else None
        if self.is_on:
            os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
            _in_thread(self._watch()).add_done_callback(Future.result)  # which tells of an error

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
        self.mark(phase)
        for item in items:
            yield item
            self.mark(phase)

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
        self._durations.setdefault(self._phase, deque(maxlen=100)).append(self._spent + self._idle)

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
        address, port = "127.0.0.1" if one_host else address_here(), 0
        if self.is_on:
            listening = socket.create_server((address, 0))
            port = listening.getsockname()[1]
            self._server = _in_thread(asyncio.start_server(self._answer, sock=listening)).result()
            atexit.register(self.mark, "shutdown")  # after Horovod's own entry, and so called before it
        return Peer(socket.gethostname(), (address, port))

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a question: this rank's status. Asked for its stacks it also writes them."""
        with contextlib.closing(writer), contextlib.suppress(*FAILURES):
            what, by = (await asyncio.wait_for(reader.readline(), ANSWER_SECONDS)).decode().split()
            if what == "stacks":
                self._save_stacks()
            elif int(by) < self.rank:
                self._next_look = time.monotonic() + DEFERENCE
            writer.write(json.dumps(self._status()).encode() + b"\n")
            await writer.drain()

    async def _ask(self, peer: Peer, question: str) -> Status | str:
        """A rank's answer, or why there is none."""
        why = UNREACHABLE
        try:
            reader, writer = await asyncio.wait_for(asyncio.open_connection(*peer.address), ANSWER_SECONDS)
            why = SILENT  # the kernel accepts connections of a stopped process
            with contextlib.closing(writer):
                writer.write(f"{question} {self.rank}\n".encode())
                return Status(*json.loads(await asyncio.wait_for(reader.readline(), ANSWER_SECONDS)))
        except FAILURES as failure:
            return GONE if isinstance(failure, (ConnectionError, ValueError, TypeError)) else why

    def _status(self) -> Status:
        frame, waits = sys._current_frames().get(self._main), self._phase.startswith("step") and self.waits_in_step()
        while frame is not None:
            waits |= frame.f_globals.get("__name__", "").startswith("horovod.")
            frame = frame.f_back
        return Status(self.rank, socket.gethostname(), self._step, self._phase, self._position, self._idle, waits)

    # The thread.

    async def _watch(self) -> None:
        tick, seen = min(TICK, (self._given or FLOOR) / 4), time.monotonic()
        while Watch._current is self:
            await asyncio.sleep(tick)
            now = time.monotonic()
            if now - seen > GAP:
                self._since += now - seen
            limit = self._limit(self._phase) * (1 if self.peers else PATIENCE)
            # One rank asks first, rank 0 if it can: its lines are those of the job.
            if self._phase != IDLE and self._idle > limit + tick * min(self.rank, 10) and now > self._next_look:
                await self._look(limit)
                self._next_look = max(self._next_look, time.monotonic() + BETWEEN_LOOKS)
            seen = time.monotonic()
        if self._server:
            self._server.close()

    async def _look(self, limit: float) -> None:
        """No progress for this long: find out why, and end the run if it cannot go on."""
        position = self._position
        others = [rank for rank in range(len(self.peers)) if rank != self.rank]
        answers = await asyncio.gather(*(self._ask(self.peers[rank], "look") for rank in others))
        statuses = [answer for answer in answers if isinstance(answer, Status)]
        absent = {
            rank: (self.peers[rank].host, answer)
            for rank, answer in zip(others, answers, strict=True)
            # At the end a rank whose process has ended is not lost.
            if isinstance(answer, str) and (self._phase != "shutdown" or answer != GONE)
        }
        if self._position != position or self._phase == "shutdown" and not absent:
            return
        if (lost := judge([self._status(), *statuses], absent, limit)) is None:
            return
        # Save stacks, name the ranks that are lost, and end this process, and so the job.
        self._save_stacks()
        await asyncio.gather(*(self._ask(self.peers[status.rank], "stacks") for status in statuses))
        ending = f"the run ends (exit code {STALLED}); stacks of all ranks that answer: {self._stacks or 'above'}"
        complain(f"no progress for {limit:.0f} s; {ending}")
        for s, why in lost:  # last: the launcher keeps the last line of each start
            complain(f"rank {s.rank} on {s.host} hangs at step {s.step} ({s.phase}): {why}")
        if not lost:
            at = f"at step {self._step} ({self._phase})"
            together = f"all ranks wait {at} for each other, or for the network"
            complain(together if self.peers else f"rank {self.rank} waits for others, which it cannot ask, {at}")
        os._exit(STALLED)

    @property
    def _stacks(self) -> Path | None:
        """The folder for stacks; None where this host has no run directory."""
        return self.run_dir / STALLS if self.run_dir and self.run_dir.is_dir() else None

    def _save_stacks(self) -> None:
        """Write what this rank does to the run directory or, where there is none, to stderr."""
        here = f"rank {self.rank} on {socket.gethostname()}, process {os.getpid()}"
        text = f"{here}: step {self._step} ({self._phase}) for {self._idle:.1f} s\nlast phases and collectives:\n"
        with contextlib.suppress(OSError):
            if folder := self._stacks:
                folder.mkdir(exist_ok=True)
            place = folder / f"step-{self._step}-rank-{self.rank}.txt" if folder else os.dup(2)
            with open(place, "w") as file:
                file.write(text + "".join(f"{line}\n" for line in recent()))
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


def _in_thread(coroutine: Coroutine[Any, Any, T]) -> Future[T]:
    return asyncio.run_coroutine_threadsafe(coroutine, _loop())
