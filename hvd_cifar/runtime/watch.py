"""The watchdog of a rank: a thread that notices a lack of progress, finds the rank that causes it, and ends the run.

Python's main thread may be inside a collective for ever, so nothing here needs that thread or Horovod. Ranks ask each
other over `channel`; a process that is stopped, or whose Python is frozen, does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import psutil

from hvd_cifar.distributed.trail import recent
from hvd_cifar.errors import STALLED
from hvd_cifar.runtime import channel
from hvd_cifar.runtime.environment import launched_rank
from hvd_cifar.runtime.inspect_process import STOPPED, computes, ranks_here, state_of
from hvd_cifar.runtime.phases import Phases
from hvd_cifar.runtime.stalls import FLOOR, PATIENCE, Lost, Status, judge

TICK = 0.5  # s between looks, at most
GAP = 3.0  # s between two ticks: the process was suspended, as on a laptop that sleeps, so the time does not count
BETWEEN_LOOKS = 3.0  # s, while no progress is made
TRIES = 5  # to reach another rank at the start
LEAD = 0.2  # s by which a rank asks later than the one before it (and a tick later than rank 0), so that one asks first
DEFERENCE = 8.0  # s for which a rank does not ask after a lower rank has asked it: longer than two looks
GLOO_SECONDS = 86_400  # Gloo's own time-out, 30 s by default, would blame a rank that only waits
STALLS = "stalls"  # the folder of stacks in the run directory
IDLE = "idle"  # the phase in which a rank may take any time

Answers = dict[int, dict[str, Any]]


@dataclass(frozen=True)
class Peer:
    """Where a rank's watchdog answers. The job's secret is rank 0's."""

    host: str
    pid: int
    address: channel.Address
    secret: str


class Watch(Phases):
    """This rank's phases, and the thread that looks at them."""

    _current: Watch | None = None  # of this process
    _of_communication: set[int] = set()  # ids of Horovod's threads

    def __init__(self, seconds: float | None) -> None:
        """Begin at start-up, and end the watch of an earlier run of this process.

        Args:
            seconds: the time-out; None: learned; 0: the watch does nothing.
        """
        super().__init__(seconds)
        self.is_on = seconds != 0
        self.rank = launched_rank() or 0
        self.run_dir: Path | None = None  # for stacks, where the host has it
        self.waits_in_step: Callable[[], bool] = lambda: False  # whether the step waits for other ranks
        self.is_alone = False  # it judges by this rank alone, after more time: others cannot be asked
        self._peers: Sequence[Peer] = ()
        self._has_joined = threading.Event()
        self._end_answers: Callable[[], None] = lambda: None
        self._next_look = 0.0
        self._slow: set[int] = set()  # ranks that have been named
        self._main = threading.get_ident()
        self._threads_before = _threads()
        if earlier := Watch._current:
            earlier.stop()
        if self.is_on:
            Watch._current = self
            os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
            threading.Thread(target=self._run, args=[min(TICK, (seconds or FLOOR) / 4)], daemon=True).start()

    @classmethod
    def sign_of_life(cls) -> None:
        """This process makes progress within a phase of unknown length, such as a download."""
        if watch := cls._current:
            watch._spent, watch._since = watch._elapsed(), time.monotonic()

    @property
    def address(self) -> str:
        """This host's address, as other ranks reach it; empty on a rank that has not joined."""
        return self._peers[self.rank].address[0] if self._peers else ""

    def listen(self, rank: int, one_host: bool) -> Peer:
        """Answer other ranks from now on, once this rank has joined them; return where."""
        self.rank = rank
        Watch._of_communication |= _threads() - self._threads_before
        address = channel.address_here(one_host), 0
        if self.is_on:
            atexit.register(self.mark, "shutdown")  # after Horovod's own entry, and so called before it
            address, self._end_answers = channel.listen(address[0], self._secret, self._answer)
        return Peer(socket.gethostname(), os.getpid(), address, secrets.token_hex(32))

    def join(self, peers: Sequence[Peer]) -> bool:
        """Tell the watch where all ranks answer, by rank; return whether the next rank does."""
        self._peers = peers
        self._has_joined.set()
        follower = (self.rank + 1) % len(peers)
        if not self.is_on or follower == self.rank:
            return True
        return any(follower in self._ask_all({"ask": "hello"}, [follower])[0] for _ in range(TRIES))

    def stop(self) -> None:
        """End the watch, which answers no more; its thread ends at its next tick."""
        Watch._current = None
        self._end_answers()
        atexit.unregister(self.mark)

    def _secret(self) -> str:
        self._has_joined.wait(channel.SECONDS)  # others may be told of it earlier
        return self._peers[0].secret if self._peers else secrets.token_hex(32)

    def _run(self, tick: float) -> None:
        seen = time.monotonic()
        while Watch._current is self:
            time.sleep(tick)
            now = time.monotonic()
            if now - seen > GAP:
                self._since += now - seen
            limit = self._limit(self._phase)
            waited = limit * (PATIENCE if self.is_alone else 1) + (TICK + min(self.rank, 10) * LEAD) * (self.rank > 0)
            if self._phase != IDLE and self._idle > waited and now > self._next_look:
                self._look(limit) if self._peers else self._look_at_start_up(limit)
                self._next_look = max(self._next_look, time.monotonic() + BETWEEN_LOOKS)
            seen = time.monotonic()

    def _look(self, limit: float) -> None:
        """No progress for this long: find out why, and end the run if it cannot go on."""
        position, question = self._position, {"ask": "status", "by": self.rank}
        answers, absent = self._ask_all(question, range(len(self._peers)))
        if absent and self._position == position:  # again: an answer may be late on a busy machine
            late, absent = self._ask_all(question, absent)
            answers |= late
        if self._phase == "shutdown":  # a rank whose process has ended is not lost
            absent = {rank: reason for rank, reason in absent.items() if reason != channel.GONE}
            if not absent:
                return
        statuses = [self._status(), *(Status(**answer) for answer in answers.values())]
        if self._position != position:
            return
        verdict = judge(statuses, {rank: (self._peers[rank].host, reason) for rank, reason in absent.items()}, limit)
        if verdict.ends:
            self._end(verdict.lost, answers, limit)
        for status in verdict.slow:
            if status.rank not in self._slow and self.rank == min({s.rank for s in statuses if s not in verdict.slow}):
                self._slow.add(status.rank)
                complain(
                    f"rank {status.rank} on {status.host} is slow at step {status.step} ({status.phase}): the other "
                    f"ranks have waited for {limit:.0f} s, and it still works"
                )

    def _ask_all(self, question: Mapping[str, Any], ranks: Collection[int]) -> tuple[Answers, dict[int, str]]:
        """Ask other ranks at once: the answers, and the reasons where there is none."""
        answers: Answers = {}
        absent: dict[int, str] = {}

        def ask(rank: int, peer: Peer) -> None:
            try:
                answers[rank] = channel.ask(peer.address, self._peers[0].secret, question)
            except channel.NoAnswer as failure:
                is_here = str(failure) == channel.SILENT and self._is_here(peer)
                absent[rank] = state_of(peer.pid) if is_here else str(failure)

        others = [] if self.is_alone else [rank for rank in ranks if rank != self.rank]
        for thread in [channel.in_thread(ask, rank, self._peers[rank]) for rank in others]:
            if thread.ident is not None:
                thread.join()
        return answers, absent

    def _is_here(self, peer: Peer) -> bool:
        """Whether a rank is on this host. Cloned machines may share a name, but not an address."""
        return (peer.host, peer.address[0]) == (socket.gethostname(), self.address)

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "end":
            os._exit(STALLED)
        if question["ask"] == "stacks":
            self._save_stacks()
        if question["ask"] != "status":
            return {}
        if question["by"] < self.rank:
            self._next_look = time.monotonic() + DEFERENCE
        return asdict(self._status())

    def _status(self) -> Status:
        frame, waits = sys._current_frames().get(self._main), self._phase == "step" and self.waits_in_step()
        while frame is not None:
            waits |= frame.f_globals.get("__name__", "").startswith("horovod.")
            frame = frame.f_back
        works = computes(os.getpid(), Watch._of_communication)
        place = (self._step, self._phase, self._position, self._idle)
        return Status(self.rank, socket.gethostname(), os.getpid(), *place, waits, works)

    def _end(self, lost: Sequence[Lost], others: Collection[int], limit: float) -> None:
        """Save stacks, name the ranks that are lost, and end all others."""
        self._save_stacks()
        self._ask_all({"ask": "stacks"}, others)
        seconds = limit * (PATIENCE if self.is_alone else 1)
        place = str(self.run_dir / STALLS) if self.run_dir and self.run_dir.is_dir() else "above"
        ending = f"the run ends (exit code {STALLED}); stacks of all ranks that answer: {place}"
        complain(f"no progress for {seconds:.0f} s; {ending}")
        # Last, and without times: the launcher compares last lines, and a job that fails twice in the same way ends.
        for one in lost:
            complain(str(one))
        if not lost:
            who = f"rank {self.rank} waits for others, which it cannot ask," if self.is_alone else "all ranks wait"
            what = "" if self.is_alone else " for each other, or for the network"
            complain(f"{who} at step {self._step} ({self._phase}){what}")
        self._ask_all({"ask": "end"}, others)
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

    def _look_at_start_up(self, limit: float) -> None:
        """Horovod has not started, so only this host is known: name its stopped ranks; without one, wait for longer."""
        found, host = ranks_here(), socket.gethostname()
        stopped = [rank for rank, pids in sorted(found.items()) if STOPPED in map(state_of, pids)]
        names_them = bool(stopped) and self.rank == min(set(found) - set(stopped))
        if not names_them and self._idle < PATIENCE * limit:
            return
        complain(f"not all ranks have started after {limit:.0f} s; the run ends (exit code {STALLED})")
        for rank in stopped:
            complain(str(Lost(rank, host, 0, "start-up", STOPPED)))
        os._exit(STALLED)


def complain(line: str) -> None:
    """Print a message to stderr past Python's buffer, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"hvd_cifar: {line}\n".encode())


def _threads() -> set[int]:
    return {thread.id for thread in psutil.Process().threads()}
