"""The watchdog of a rank: a thread that notices a lack of progress, finds the rank that causes it, and ends the run.

Python's main thread may be inside a collective for ever, so nothing here needs that thread or Horovod. Ranks ask each
other over `channel`; a process that is stopped, or whose Python is frozen, does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from hvd_cifar.distributed.trail import note, recent
from hvd_cifar.errors import STALLED
from hvd_cifar.runtime import channel
from hvd_cifar.runtime.environment import launched_rank
from hvd_cifar.runtime.stalls import PATIENCE, Durations, Lost, Status, Verdict, judge

T = TypeVar("T")

TICK = 0.5  # s between looks
GAP = 3.0  # s between two ticks: the process was suspended, as on a laptop that sleeps, so the time does not count
BETWEEN_LOOKS = 3.0  # s, while no progress is made
TRIES = 5  # to reach another rank at the start
LEAD = 0.2  # s by which a rank asks later than the one before it (and a tick later than rank 0), so that one asks first
DEFERENCE = 8.0  # s for which a rank does not ask after a lower rank has asked it: longer than two looks
STAND_BY = 1.0  # s after which ranks that do not answer are killed, once those that answer have ended
GLOO_SECONDS = 86_400  # Gloo's own time-out, 30 s by default, would blame a rank that only waits
THREAD_NAME = b"hvd watch"  # which other processes can read
PR_SET_NAME = 15  # of Linux's prctl
IDLE = "idle"  # the phase in which a rank may take any time


@dataclass(frozen=True)
class Peer:
    """Where a rank's watchdog answers."""

    host: str
    pid: int
    address: channel.Address


class Watch:
    """This rank's phases, and the thread that looks at them."""

    _current: Watch | None = None  # of this process
    _of_communication: set[int] = set()  # ids of Horovod's threads

    def __init__(self, seconds: float | None) -> None:
        """Begin at start-up, and end the watch of an earlier run of this process.

        Args:
            seconds: the time-out; None: learned; 0: the watch does nothing.
        """
        self.is_on = seconds != 0
        self.rank = launched_rank() or 0
        self.run_dir: Path | None = None  # for stacks, where the host has it
        self.waits_in_step: Callable[[], bool] = lambda: False  # whether the step waits for other ranks
        self._durations = Durations(seconds)
        self._host = socket.gethostname()
        self._secret = secrets.token_hex(32)  # nobody knows it before `trust`
        self._peers: Sequence[Peer] = ()
        self._end_answers: Callable[[], None] = lambda: None
        self._phase, self._step, self._position, self._since = "start-up", 0, 0, time.monotonic()
        self._spent = 0.0  # s in this phase before a phase within it
        self._asked = 0.0  # when a rank of lower number last asked
        self._next_look = 0.0
        self._slow: set[int] = set()
        self._main = threading.get_ident()
        self._before = set(_threads())
        if earlier := Watch._current:
            earlier.stop()
        if self.is_on:
            Watch._current = self
            os.environ["HOROVOD_STALL_CHECK_DISABLE"] = "1"
            os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(GLOO_SECONDS)
            threading.Thread(target=self._run, daemon=True).start()

    # What the rank's main thread calls.

    def mark(self, phase: str, step: int | None = None) -> None:
        """A phase begins: this rank makes progress."""
        self._durations.add(self._phase, self._elapsed())
        self._step = self._step if step is None else step
        self._begin(phase)

    @classmethod
    def sign_of_life(cls) -> None:
        """This process makes progress within a phase of unknown length, such as a download."""
        if watch := cls._current:
            watch._spent, watch._since = watch._elapsed(), time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase within another one, whose duration is that of its pieces."""
        outer, spent = self._phase, self._elapsed()
        self._begin(name)
        yield
        self._durations.add(self._phase, self._elapsed())
        self._begin(outer, spent)

    def _elapsed(self) -> float:
        return self._spent + time.monotonic() - self._since

    def _begin(self, phase: str, spent: float = 0.0) -> None:
        self._phase, self._since, self._spent = phase, time.monotonic(), spent
        self._position += 1
        note(f"{phase}, step {self._step}")

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

    @property
    def address(self) -> str:
        """This host's address, as other ranks reach it; empty on a rank that has not joined."""
        return self._peers[self.rank].address[0] if self._peers else ""

    def listen(self, rank: int, one_host: bool) -> tuple[Peer, str]:
        """Answer other ranks from now on.

        Returns where this rank answers, and a new secret. Rank 0's becomes that of the job: see `trust`.
        """
        self.rank = rank
        Watch._of_communication |= set(_threads()) - self._before
        if self.is_on:
            atexit.register(self.mark, "shutdown")  # after Horovod's own entry, and so called before it
        address = channel.address_here(one_host), 0
        if self.is_on:
            address, self._end_answers = channel.listen(address[0], lambda: self._secret, self._answer)
        return Peer(self._host, os.getpid(), address), secrets.token_hex(32)

    def trust(self, secret: str) -> None:
        """Answer those who know the job's secret."""
        self._secret = secret

    def join(self, peers: Sequence[Peer]) -> None:
        """Tell the watch where all ranks answer, by rank."""
        self._peers = peers

    def reaches(self, rank: int) -> bool:
        """Whether another rank's watchdog answers."""
        for _ in range(TRIES if self.is_on and rank != self.rank else 0):
            with contextlib.suppress(channel.Silent, channel.Gone, channel.Unreachable):
                channel.ask(self._peers[rank].address, self._secret, {"ask": "hello"})
                return True
        return not self.is_on or rank == self.rank

    def stop(self) -> None:
        """End the watch, which answers no more; its thread ends at its next tick."""
        Watch._current = None
        self._end_answers()
        atexit.unregister(self.mark)

    # What its thread does.

    def _run(self) -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, THREAD_NAME, 0, 0, 0)
        seen = time.monotonic()
        while Watch._current is self:
            time.sleep(TICK)
            now = time.monotonic()
            if now - seen > GAP:
                self._since += now - seen
            phase = self._phase
            limit = self._durations.limit(phase)
            is_over = now - self._since > limit + (TICK + min(self.rank, 10) * LEAD if self.rank else 0)
            if phase != IDLE and is_over and now > max(self._asked + DEFERENCE, self._next_look):
                self._look(limit)
                self._next_look = time.monotonic() + BETWEEN_LOOKS
            seen = time.monotonic()

    def _look(self, limit: float) -> None:
        """No progress for this long: find out why, and end the run if it cannot go on."""
        if not self._peers:
            self._look_at_start_up(limit)
            return
        position = self._position
        statuses, absent = self._ask_all()
        if absent and self._position == position:  # again: an answer may be late on a busy machine
            again, absent = self._ask_all(list(absent))
            statuses |= again
        if self._phase == "shutdown":  # a rank whose process has ended is not lost
            absent = {rank: reason for rank, reason in absent.items() if "ended" not in reason[1]}
            if not absent:
                return
        if self._position != position:
            return
        verdict = judge(list(statuses.values()), absent, limit)
        for status in verdict.slow:
            if status.rank not in self._slow:
                self._slow.add(status.rank)
                _complain(
                    f"rank {status.rank} on {status.host} is slow at step {status.step} ({status.phase}): the other "
                    f"ranks have waited for {limit:.0f} s, and it still works"
                )
        if verdict.ends:
            self._end(verdict, list(statuses.values()), limit)

    def _ask_all(self, ranks: Sequence[int] | None = None) -> tuple[dict[int, Status], dict[int, tuple[str, str]]]:
        statuses: dict[int, Status] = {}
        absent: dict[int, tuple[str, str]] = {}
        question = {"ask": "status", "by": self.rank, "slow": sorted(self._slow)}

        def ask(rank: int) -> None:
            peer = self._peers[rank]
            if rank == self.rank:
                statuses[rank] = self._status()
                return
            try:
                statuses[rank] = Status(**channel.ask(peer.address, self._secret, question))
            except channel.Gone:
                absent[rank] = peer.host, "its process has ended"
            except channel.Unreachable:
                absent[rank] = peer.host, "its host cannot be reached"
            except channel.Silent:
                absent[rank] = peer.host, state_of(peer.pid) if self._is_here(peer) else "it does not answer"

        _at_once(ask, range(len(self._peers)) if ranks is None else ranks)
        return statuses, absent

    def _is_here(self, peer: Peer) -> bool:
        """Whether a rank is on this host. Cloned machines may share a name, but not an address."""
        return peer.host == self._host and peer.address[0] == self.address

    def _answer(self, question: dict[str, Any]) -> dict[str, Any]:
        if question["ask"] == "end":
            os._exit(STALLED)
        if question["ask"] == "hello":
            return {}
        self._slow |= set(question["slow"])  # these have been named
        if question["by"] < self.rank:
            self._asked = time.monotonic()
        return asdict(self._status())

    def _status(self) -> Status:
        frame = sys._current_frames().get(self._main)
        horovod = os.path.dirname(sys.modules["horovod"].__file__ or "") + os.sep
        in_collective = False
        while frame is not None:
            in_collective |= frame.f_code.co_filename.startswith(horovod)
            frame = frame.f_back
        return Status(
            self.rank,
            self._host,
            os.getpid(),
            self._step,
            self._phase,
            self._position,
            time.monotonic() - self._since,
            waits=in_collective or (self._phase == "step" and self.waits_in_step()),
            computes=_computes("self", Watch._of_communication),
            recent=recent(),
            stacks=_stacks(),
        )

    def _end(self, verdict: Verdict, statuses: Sequence[Status], limit: float) -> None:
        """Save stacks, name the rank, and end all ranks."""
        lost = verdict.lost
        place = self._save(statuses, lost)
        _complain(f"no progress for {limit:.0f} s; the run ends (exit code {STALLED}); {place}")
        # Last, and without times: the launcher compares last lines, and a job that fails twice in the same way ends.
        for one in lost:
            _complain(str(one))
        if not lost:
            _complain(f"all ranks wait at step {self._step} ({self._phase}) for each other, or for the network")
        missing = {one.rank for one in lost} - {s.rank for s in statuses}
        here = [self._peers[r].pid for r in missing if self._peers and self._is_here(self._peers[r])]
        _kill_later(here)
        others = [s.rank for s in statuses if s.rank != self.rank]

        def end(rank: int) -> None:
            with contextlib.suppress(channel.Silent, channel.Gone, channel.Unreachable):
                channel.ask(self._peers[rank].address, self._secret, {"ask": "end"})

        _at_once(end, others)
        os._exit(STALLED)

    def _save(self, statuses: Sequence[Status], lost: Sequence[Lost]) -> str:
        """Write the ranks' status to the run directory, or to stderr; return in words where it is."""
        parts = [f"{one}\n" for one in lost]
        for s in sorted(statuses, key=lambda s: s.rank):
            parts.append(
                f"\n=== rank {s.rank} on {s.host}, process {s.pid}: step {s.step} ({s.phase}) for {s.idle:.1f} s"
                f"{', waits for other ranks' * s.waits}\n{s.stacks}\nlast phases and collectives:\n"
                + "".join(f"{line}\n" for line in s.recent)
            )
        text = "".join(parts)
        if self.run_dir is not None and self.run_dir.is_dir():
            folder = self.run_dir / "stalls"
            with contextlib.suppress(OSError):
                folder.mkdir(exist_ok=True)
                path = folder / f"step-{self._step}-{time.strftime('%Y%m%d-%H%M%S')}.txt"
                path.write_text(text)
                return f"stacks of all ranks that answer: {path}"
        _complain(text)
        return "the stacks of all ranks that answer are above"

    def _look_at_start_up(self, limit: float) -> None:
        """Horovod has not started, so only this host is known: look for ranks that have not come as far."""
        found = ranks_here()
        others = {rank: pids for rank, pids in found.items() if rank != self.rank}
        late = {r: p for r, p in others.items() if not any(map(_is_watched, p)) or "stopped" in _worst(p)}
        waited = time.monotonic() - self._since
        if not late and waited < limit + DEFERENCE:
            return  # a rank on the same host as a late one names it
        if waited < PATIENCE * limit and any(_computes(pid) for pids in late.values() for pid in pids):
            return
        lost = [Lost(r, self._host, 0, "start-up", _worst(pids)) for r, pids in sorted(late.items())]
        first = min(set(found) - set(late), default=self.rank)
        if self.rank == first or not late:
            self._end_of_start_up(lost, limit)

    def _end_of_start_up(self, lost: Sequence[Lost], limit: float) -> None:
        _complain(f"not all ranks have started after {limit:.0f} s; the run ends (exit code {STALLED})")
        for one in lost:
            _complain(str(one))
        if not lost:
            _complain(f"rank {self.rank} on {self._host} waits for ranks on other hosts, which have not started")
        found = ranks_here()
        _kill_later([pid for one in lost for pid in found.get(one.rank, ())])
        os._exit(STALLED)


def _complain(line: str) -> None:
    """Print to stderr past Python's buffer, whose lock the main thread may hold."""
    with contextlib.suppress(OSError):
        os.write(2, f"hvd_cifar: {line}\n".encode())


def _at_once(function: Callable[[int], None], ranks: Iterable[int]) -> None:
    threads = [threading.Thread(target=function, args=[rank], daemon=True) for rank in ranks]
    for thread, rank in zip(threads, ranks, strict=True):
        try:
            thread.start()
        except RuntimeError:  # Python is ending, and starts no thread
            function(rank)
    for thread in threads:
        if thread.ident is not None:
            thread.join()


def _worst(pids: Sequence[int]) -> str:
    states = [state_of(pid) for pid in pids]
    return next((s for s in states if "stopped" in s), states[0] if states else "its process has ended")


def state_of(pid: int) -> str:
    """Why a process of this host does not answer, as far as Linux tells."""
    try:
        fields = dict(
            line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in line
        )
    except OSError:
        return "its process has ended"
    state = fields.get("State", "?").strip()
    if state.startswith(("T", "t")):
        return "its process is stopped (SIGSTOP or a debugger)"
    if state.startswith("Z"):
        return "its process has ended"
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text().strip("\n0")
        return f"its Python does not run; process state {state}" + f", in the kernel's {where}" * bool(where)
    return f"its Python does not run; process state {state}"


def ranks_here(environ: Mapping[str, str] = os.environ) -> dict[int, list[int]]:
    """The process ids of this job's ranks on this host, by rank: processes with the same variables of the launcher."""
    names = (
        "PMIX_NAMESPACE",
        "OMPI_MCA_ess_base_jobid",
        "HOROVOD_GLOO_RENDEZVOUS_PORT",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    )
    own = {name: environ[name] for name in names if name in environ}
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = process.environ()
            rank = launched_rank(theirs)
            if own and rank is not None and all(theirs.get(name) == value for name, value in own.items()):
                found.setdefault(rank, []).append(process.pid)
    return found


def _threads(pid: int | str = "self") -> list[int]:
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    return []


def _is_watched(pid: int) -> bool:
    """Whether a process has begun to start Horovod: it has a watchdog."""
    for thread in _threads(pid):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/task/{thread}/comm").read_bytes().strip() == THREAD_NAME:
                return True
    return False


def _computes(pid: int | str, left_out: Collection[int] = (), samples: int = 10, seconds: float = 0.05) -> bool:
    """Whether any thread of a process is runnable in at least half of the samples, or it uses a disk.

    This thread is left out.
    """
    found, before = 0, _bytes_of_files(pid)
    for _ in range(samples):
        for thread in {*_threads(pid)} - {*left_out, threading.get_native_id()}:
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "R":
                    found += 1
                    break
        time.sleep(seconds)
    return found >= samples / 2 or _bytes_of_files(pid) > before


def _bytes_of_files(pid: int | str) -> int:
    """Bytes that a process has read from disks and written to files, as a download does; 0 where Linux does not tell.

    Disks of other hosts count; pipes, sockets and shared memory do not.
    """
    with contextlib.suppress(OSError, ValueError, LookupError):
        told = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        return int(told["read_bytes"]) + int(told["write_bytes"])
    return 0


def _stacks() -> str:
    """The stacks of all Python threads."""
    # A pipe, since no folder may be writable. It holds 64 KiB, and what does not fit is left out.
    reader, writer = os.pipe()
    with open(reader, "rb") as told:
        try:
            os.set_blocking(writer, False)
            faulthandler.dump_traceback(writer, all_threads=True)
        finally:
            os.close(writer)
        return told.read().decode(errors="replace")


def _kill_later(pids: Sequence[int]) -> None:
    """Have processes of this host killed when this one has ended, so that its exit code is the job's."""
    if pids:
        words = ["sh", "-c", f"sleep {STAND_BY}; kill -KILL {' '.join(map(str, pids))}"]
        with contextlib.suppress(OSError):
            subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
