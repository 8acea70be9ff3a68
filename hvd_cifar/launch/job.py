"""A job: runs the program that starts the ranks, such as mpirun, and passes requests to stop on to the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from hvd_cifar.errors import RESUME, STALLED, TrainingError
from hvd_cifar.launch.cluster.remarks import without_banners
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank
from hvd_cifar.launch.restarts import last_said
from hvd_cifar.runtime.environment import LAUNCH, Launch
from hvd_cifar.runtime.inspect_process import is_pending, waited_for
from hvd_cifar.runtime.process import adopt_orphans
from hvd_cifar.runtime.stalls import lost_ranks

SECONDS_FOR_LAST_OUTPUT = 5.0
SECONDS_FOR_ORPHANS = 2.0  # before they are killed: those that print a rank's last lines end by themselves
SECONDS_BETWEEN_ASKS = 1.0
SECONDS_FOR_MPIRUN = 5.0  # to end a job by itself, once a rank has ended
SECONDS_FOR_STARTER = 3.0  # for the starter to end, after the ranks have named one that hangs
TAIL_BYTES = 4096
ENDS_TOLD = 8  # number of earlier ends that the next start is told, in a variable of limited length
LONGEST_END = 300  # characters

# Signals a starter if this process ends before it, for whatever reason. Linux's PR_SET_PDEATHSIG would send a signal
# for each thread of this process, and mpirun takes a second one as a request to end without removing its files.
HEIR = "trap '' HUP INT TERM USR1; read -r pid && { read -r _ || kill -$1 $pid; }"


@dataclass(frozen=True)
class Starter:
    """A program that starts ranks: mpirun, or the Python of a single rank, which inherits stdout.

    words, env: its command line and variables.
    hosts: each rank's host where there are several hosts, else ().
    proof: a file that ranks write, or touch, before they end with code 0; None: their code says enough.
    """

    words: list[str]
    env: Mapping[str, str]
    hosts: Sequence[str] = ()
    proof: Path | None = None

    @property
    def name(self) -> str:
        """The program's name."""
        return Path(self.words[0]).name

    @property
    def is_rank(self) -> bool:
        """Whether it is the only rank itself."""
        return self.name != "mpirun"


class Job:
    """Runs starters, one after the other, and passes signals on to them.

    If ranks can write a checkpoint and stop (`can_stop`), SIGTERM, SIGUSR1, SIGHUP and a first SIGINT ask them to; a
    second SIGINT ends them. Otherwise every signal except SIGUSR1 ends them.
    """

    def __init__(self, can_stop: bool) -> None:
        self.can_stop = can_stop
        self.asked = False  # by the user
        self._stops = False  # the current ranks are asked to stop
        self.tail = b""  # end of what the user saw on stderr
        self._caught: list[int] = []
        self._began = psutil.Process().create_time()
        self._ends: list[str] = []  # how starts ended, see `environment.Launch`
        self._starter: Starter | None = None
        self._process: subprocess.Popen[Any] | None = None
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    def run(self, starter: Starter) -> int:
        """Start ranks, and wait until they end. None of their processes is left on this host.

        Returns:
            The starter's exit code; 128 + the signal, if a signal ended the job; `RESUME`, if ranks stopped as asked.
        """
        self._starter, self.tail, self._stops = starter, b"", self.asked
        proof_before = _mark_of(starter.proof)  # of an earlier job
        # mpirun kills its ranks 2 s after a SIGTERM, too soon for a checkpoint. It runs with the signal blocked: a
        # SIGTERM sent to mpirun itself stays pending, where this process sees it. mpirun unblocks signals for its
        # children, and SIGINT ends it as SIGTERM would.
        holds_sigterm = self.can_stop and not starter.is_rank
        heir = _start_heir("INT" if holds_sigterm else "TERM")
        process = self._start(starter, holds_sigterm)
        assert heir.stdin
        heir.stdin.write(f"{process.pid}\n".encode())
        heir.stdin.flush()
        self._process = process
        if self._caught and self._ends_at_once:
            self._end(self._caught[-1])  # it came before there was a process
        pumps = [threading.Thread(target=self._show_errors, args=[process.stderr, starter], daemon=True)]
        if not starter.is_rank:
            pumps.append(threading.Thread(target=_show_output, args=[process.stdout, bool(starter.hosts)], daemon=True))
        for pump in pumps:
            pump.start()
        why = self._wait(process, holds_sigterm)
        code = process.wait()
        heir.communicate(b"ended\n")
        was_killed = code == -signal.SIGKILL
        if why and was_killed:
            code = why
        if code < 0 and not self._caught:
            who, more = ("rank 0", "") if starter.is_rank else (starter.name, ", and its ranks with it")
            complain(f"{who} was ended by signal {-code} ({signal.Signals(-code).name}){more}")
        _end_orphans(process.pid, 0 if was_killed else SECONDS_FOR_ORPHANS)
        if was_killed:
            remove_session(process.pid, starter.env)
        for pump in pumps:
            pump.join(SECONDS_FOR_LAST_OUTPUT)
        outcome = self._outcome(code if code >= 0 else 128 - code)
        # No more than C's `_exit` gives such a code.
        if outcome == 0 and starter.proof and _mark_of(starter.proof) in (None, proof_before):
            who = "rank 0 ended first," if starter.is_rank else "all ranks ended"
            self.pass_on(f"hvd_cifar: {who} with exit code 0, before the job was over\n".encode())
            outcome = TrainingError.code
        self._ends.append(last_said(self.tail).removeprefix("hvd_cifar: ")[:LONGEST_END] or f"exit code {outcome}")
        return outcome

    def _start(self, starter: Starter, holds_sigterm: bool) -> subprocess.Popen[Any]:
        launch = Launch(self._began, len(self._ends), self._ends[-ENDS_TOLD:])

        def prepare() -> None:
            if holds_sigterm:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        # In its own session: Ctrl-C reaches only this process, which forwards it.
        return subprocess.Popen(
            starter.words,
            env={**starter.env, LAUNCH: json.dumps(launch)},
            stdin=None if starter.is_rank else subprocess.DEVNULL,  # a single rank may have a debugger
            stdout=None if starter.is_rank else subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,  # safe: other threads only wait
        )

    def _wait(self, process: subprocess.Popen[Any], holds_sigterm: bool) -> int:
        """Wait until a starter ends, and pass requests to stop on.

        Returns the exit code of a job that was ended, since a rank held it up; else 0.
        """
        code, end, missed_for = 0, 0.0, 0.0
        while not _ends(process, SECONDS_BETWEEN_ASKS):
            missed_for = missed_for + SECONDS_BETWEEN_ASKS if (missed := waited_for(process.pid)) else 0.0
            if code and time.monotonic() > end:
                process.kill()  # mpirun waits for hosts that it cannot reach
            elif not code and lost_ranks(self.tail.decode(errors="replace")):
                code, end = STALLED, time.monotonic() + SECONDS_FOR_STARTER
            elif not code and missed_for > SECONDS_FOR_MPIRUN:
                code = TrainingError.code
                for rank in missed:
                    line = f"hvd_cifar: rank {rank} ended first, with exit code 0, before the job was over\n"
                    self.pass_on(line.encode())
            if holds_sigterm and is_pending(process.pid, signal.SIGTERM):
                self._ask(signal.SIGTERM)
            elif self._stops:
                self._tell_ranks()  # again, for ranks that had not started before
        return code

    @property
    def runs(self) -> bool:
        """Whether ranks run."""
        return self._process is not None and self._process.returncode is None

    @property
    def stops(self) -> bool:
        """Whether the current or last ranks were asked to stop, by the user or by `ask`."""
        return self._stops

    def wait(self, seconds: float) -> bool:
        """Wait between two starts. False if a signal has ended the job."""
        end = time.monotonic() + seconds
        while not self._caught and time.monotonic() < end:
            time.sleep(0.1)
        return not self._caught

    def pass_on(self, data: bytes) -> None:
        """Print to stderr what ranks printed there, and remember its end."""
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        write(2, data)

    def _show_errors(self, stream: BinaryIO, starter: Starter) -> None:
        """Pass stderr on: as it is from a single rank; from mpirun with each rank's name, without its banners."""
        if starter.is_rank:
            for piece in chunks(stream):
                self.pass_on(piece)
            return
        lines = NamedLines(starter.hosts)

        def of_mpirun() -> Iterator[bytes]:
            for rank, piece in by_rank(chunks(stream)):
                if rank is None:
                    yield piece
                else:
                    self.pass_on(lines.add(rank, piece))

        found = [value for name, value in pairwise(starter.words) if name == "btl_tcp_if_include"]
        subnets = found[0].split(",") if found and "," in found[0] else []
        pieces, last = (of_mpirun(), lines.last) if starter.hosts else (chunks(stream), None)
        for piece in without_banners(pieces, subnets, last):
            self.pass_on(piece)
        self.pass_on(lines.rest())

    def _outcome(self, code: int) -> int:
        if self._caught and self._ends_at_once:
            return 128 + self._caught[0]
        # A signal ends ranks that have no handlers yet.
        is_signals = self._stops and code in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
        return RESUME if is_signals else code

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGUSR1 and not self.can_stop:
            if self._starter and not self._starter.is_rank:
                self._send(number)  # a program of the user's own may call `hvd_cifar.train`
            return
        self._caught.append(number)
        if self._ends_at_once:
            self._end(number)
        else:
            self._ask(number)

    @property
    def _ends_at_once(self) -> bool:
        """Whether the signals so far end the ranks, and do not ask them to stop."""
        return not self.can_stop or self._caught.count(signal.SIGINT) > 1

    def ask(self, why: str) -> None:
        """Ask the current ranks to write a checkpoint and stop. `run` then returns `RESUME`."""
        complain(why)
        self._stops = True
        self._tell_ranks()

    def _ask(self, number: int) -> None:
        if self.asked:
            self._tell_ranks()
            return
        self.asked = True
        self.ask(f"{signal.Signals(number).name}: ranks write a checkpoint and stop; Ctrl-C twice: at once")

    def _tell_ranks(self) -> None:
        if self._starter is None or self._process is None:
            return
        self._send(signal.SIGTERM if self._starter.is_rank else signal.SIGUSR1)  # which mpirun forwards to all ranks

    def _end(self, number: int) -> None:
        if self._starter and self._starter.is_rank and self._process and self.can_stop:
            self._process.kill()  # a single rank, for which the first SIGINT would be a request also
        # Starters clean up on SIGINT and SIGTERM, not on SIGHUP.
        self._send(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _send(self, number: int) -> None:
        if self._process is not None:
            self._process.send_signal(number)


def _mark_of(proof: Path | None) -> tuple[int, int] | None:
    """What changes when a file is written or touched; None: it is not there."""
    with contextlib.suppress(OSError):
        state = proof.stat() if proof else None
        return (state.st_ino, state.st_mtime_ns) if state else None
    return None


def _start_heir(number: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        ["sh", "-c", HEIR, "sh", number],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ends(process: subprocess.Popen[Any], seconds: float) -> bool:
    """Whether a process ends within some time. Some Pythons, such as conda's, have no `os.pidfd_open` for this."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def _show_output(stream: BinaryIO, is_tagged: bool) -> None:
    """Print rank 0's stdout. Even on one host mpirun ends its ranks if it cannot write their output."""
    for rank, piece in by_rank(chunks(stream)) if is_tagged else ((0, piece) for piece in chunks(stream)):
        if rank in (0, None):
            write(1, piece)


def _end_orphans(session: int, seconds: float) -> None:
    """Wait for processes that a starter left in its session, then kill them: a killed mpirun ends no rank."""
    orphans = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(ProcessLookupError):
            orphans += [process] if os.getsid(process.pid) == session else []
    _, alive = psutil.wait_procs(orphans, seconds)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, SECONDS_FOR_ORPHANS)


def remove_session(pid: int, environ: Mapping[str, str]) -> None:
    """Remove what a killed mpirun leaves: its session's folder, and its ranks' shared memory."""
    shared = Path(environ.get("OMPI_MCA_btl_vader_backing_directory", "/dev/shm"))
    for session in Path(environ.get("TMPDIR", "/tmp")).glob(f"ompi.*.{os.getuid()}/pid.{pid}"):
        with contextlib.suppress(OSError, ValueError):
            # The segments' names contain the job's number, which follows mpirun's own.
            number = int((session / "contact.txt").read_text().partition(".")[0]) + 1
            for segment in shared.glob(f"vader_segment.*.{os.getuid()}.{number:x}.*"):
                segment.unlink()
        shutil.rmtree(session, ignore_errors=True)


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """A stream's bytes, as they arrive."""
    while chunk := os.read(stream.fileno(), 65536):
        yield chunk


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data`, or ignore that it cannot be written."""
    # A closed pipe (`| head`), a closed terminal or a full disk must not end the job, nor its reading of the ranks'
    # output: with a full pipe ranks would block.
    with contextlib.suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another program has made it non-blocking
                select.select([], [descriptor], [])


def complain(message: str) -> None:
    """Print a message of the launcher."""
    write(2, os.fsencode(f"hvd_cifar: {message}\n"))  # with names as they are, also those that are not UTF-8
