"""A job: runs mpirun, which starts the ranks, and passes requests to stop on to the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from hvd_cifar.errors import RESUME, STALLED, TrainingError
from hvd_cifar.files import complain, write
from hvd_cifar.launch.output import Errors, Lost, by_rank
from hvd_cifar.runtime.environment import LAUNCH, Launch
from hvd_cifar.runtime.process import adopt_orphans, is_pending
from hvd_cifar.runtime.watch import lost_ranks

SECONDS_FOR_LAST_OUTPUT = 5.0
SECONDS_FOR_ORPHANS = 2.0  # before they are killed: those that print a rank's last lines end by themselves
SECONDS_BETWEEN_ASKS = 1.0
SECONDS_FOR_STARTER = 3.0  # for mpirun to end, after the ranks have named one that hangs
TAIL_BYTES = 4096
ENDS_TOLD = 8  # number of earlier ends that the next start is told, in a variable of limited length
LONGEST_END = 300  # characters

# Reads a command, and runs it when its input then ends without another line. Linux's PR_SET_PDEATHSIG would send a
# signal for each thread of this process, and mpirun takes a second one as a request to end without removing its files.
HEIR = "trap '' HUP INT TERM USR1; exec >/dev/null 2>&1; read -r line && { read -r _ || eval \"$line\"; }"


class Heir:
    """A process that runs a command of the shell if this process ends, for whatever reason, before `release`."""

    def __init__(self) -> None:
        words = ["sh", "-c", HEIR]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, text=True)

    def inherit(self, command: str) -> None:
        """Say which command."""
        assert self._process.stdin
        self._process.stdin.write(f"{command}\n")
        self._process.stdin.flush()

    def release(self, *, runs: bool = False) -> None:
        """End the process; `runs`: after it has run the command."""
        self._process.communicate("" if runs else "over\n")


@dataclass(frozen=True)
class Starter:
    """mpirun's command line and variables."""

    words: list[str]
    env: Mapping[str, str]
    hosts: Sequence[str] = ()  # each rank's, where there are several
    proof: Path | None = None  # what ranks write, or touch, before they end with code 0; None: their code says enough


class Job:
    """Runs mpirun, once or several times, and passes signals on to it.

    If ranks can write a checkpoint and stop (`can_stop`), SIGTERM, SIGUSR1, SIGHUP and a first SIGINT ask them to; a
    second SIGINT ends them. Otherwise every signal except SIGUSR1 ends them.
    """

    def __init__(self, can_stop: bool) -> None:
        self.can_stop = can_stop
        self.asked = False  # whether the user has asked the job to stop
        self.stops = False  # whether the current or last ranks were asked to stop, by the user or by `ask`
        self.tail = b""  # the end of what the user saw on stderr
        self._caught: list[int] = []
        self._began = psutil.Process().create_time()
        self._ends: list[str] = []  # how starts ended, see `environment.Launch`
        self._errors = Errors(())
        self._process: subprocess.Popen[Any] | None = None
        adopt_orphans()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)

    @property
    def runs(self) -> bool:
        """Whether ranks run."""
        return self._process is not None and self._process.returncode is None

    @property
    def lost(self) -> list[Lost]:
        """The ranks and hosts that the last start lost: only the one that hangs, if ranks name one."""
        hanging = lost_ranks(self.tail.decode(errors="replace"))
        return [Lost(host, rank) for rank, host in hanging.items()] or self._errors.lost

    @property
    def last_words(self) -> str:
        """The last message of this program at the end of stderr; "": there is none."""
        start = "hvd_cifar: "
        lines = [line for line in self.tail.decode(errors="replace").splitlines() if line.startswith(start)]
        return lines[-1].removeprefix(start) if lines else ""

    def run(self, starter: Starter) -> int:
        """Start ranks, and wait until they end. None of their processes is left on this host.

        Returns:
            mpirun's exit code; 128 + the signal, if a signal ended the job; `RESUME`, if ranks stopped as asked.
        """
        self.tail, self.stops, self._errors = b"", self.asked, Errors(starter.hosts)
        proof_before = _mark_of(starter.proof)  # of an earlier job
        heir = Heir()
        process = self._process = self._start(starter)
        heir.inherit(f"kill -{'INT' if self.can_stop else 'TERM'} {process.pid}")
        if self._caught and self._ends_at_once:
            self._end(self._caught[-1])  # it came before there was a process
        pumps = [
            threading.Thread(target=self._show_errors, args=[process.stderr], daemon=True),
            threading.Thread(target=_show_output, args=[process.stdout, bool(starter.hosts)], daemon=True),
        ]
        for pump in pumps:
            pump.start()
        why, code = self._wait(process), process.wait()
        heir.release()
        was_killed = code == -signal.SIGKILL
        if why and was_killed:
            code = why
        if code < 0 and not self._caught:
            complain(f"mpirun was ended by signal {-code} ({signal.Signals(-code).name}), and its ranks with it")
        _end_orphans(process.pid, 0 if was_killed else SECONDS_FOR_ORPHANS)
        if was_killed:
            remove_session(process.pid, starter.env)
        for pump in pumps:
            pump.join(SECONDS_FOR_LAST_OUTPUT)
        outcome = self._outcome(code if code >= 0 else 128 - code)
        # No more than C's `_exit` gives such a code.
        if outcome == 0 and starter.proof and _mark_of(starter.proof) in (None, proof_before):
            self._pass_on(b"hvd_cifar: all ranks ended with exit code 0, before the job was over\n")
            outcome = TrainingError.code
        self._ends.append(self.last_words[:LONGEST_END] or f"exit code {outcome}")
        return outcome

    def _start(self, starter: Starter) -> subprocess.Popen[Any]:
        launch = Launch(self._began, len(self._ends), self._ends[-ENDS_TOLD:])

        def prepare() -> None:
            # mpirun kills its ranks 1 s after a SIGTERM, too soon for a checkpoint. It runs with the signal blocked: a
            # SIGTERM sent to mpirun itself stays pending, where this process sees it. mpirun unblocks signals for its
            # children, and SIGINT ends it as SIGTERM would.
            if self.can_stop:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

        # In its own session: Ctrl-C reaches only this process, which forwards it.
        return subprocess.Popen(
            starter.words,
            env={**starter.env, LAUNCH: json.dumps(launch)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,  # safe: other threads only wait
        )

    def _wait(self, process: subprocess.Popen[Any]) -> int:
        """Wait until mpirun ends, and pass requests to stop on.

        Returns the exit code of a job that was ended, since a rank held it up; else 0.
        """
        code, end = 0, 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_BETWEEN_ASKS)
                return code
            if code and time.monotonic() > end:
                process.kill()  # mpirun waits for hosts that it cannot reach
            elif not code and lost_ranks(self.tail.decode(errors="replace")):
                code, end = STALLED, time.monotonic() + SECONDS_FOR_STARTER
            if self.can_stop and is_pending(process.pid, signal.SIGTERM):
                self._ask(signal.SIGTERM)
            elif self.stops:
                self._send(signal.SIGUSR1)  # again, for ranks that had not started before

    def wait(self, seconds: float) -> bool:
        """Wait between two starts. False if a signal has ended the job."""
        end = time.monotonic() + seconds
        while not self._caught and time.monotonic() < end:
            time.sleep(0.1)
        return not self._caught

    def _pass_on(self, data: bytes) -> None:
        """Print to stderr what ranks printed there, and remember its end."""
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        write(2, data)

    def _show_errors(self, stream: BinaryIO) -> None:
        for piece in self._errors.shown(_chunks(stream)):
            self._pass_on(piece)

    def _outcome(self, code: int) -> int:
        if self._caught and self._ends_at_once:
            return 128 + self._caught[0]
        # A signal ends ranks that have no handlers yet.
        is_signals = self.stops and code in (128 + signal.SIGUSR1, 128 + signal.SIGTERM)
        return RESUME if is_signals else code

    def _on_signal(self, number: int, _: object) -> None:
        if number == signal.SIGUSR1 and not self.can_stop:
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
        self.stops = True
        self._send(signal.SIGUSR1)  # which mpirun forwards to all ranks

    def _ask(self, number: int) -> None:
        if self.asked:
            self._send(signal.SIGUSR1)
            return
        self.asked = True
        self.ask(f"{signal.Signals(number).name}: ranks write a checkpoint and stop; Ctrl-C twice: at once")

    def _end(self, number: int) -> None:
        # mpirun cleans up on SIGINT and SIGTERM, not on SIGHUP.
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


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    """A stream's bytes, as they arrive."""
    while chunk := os.read(stream.fileno(), 65536):
        yield chunk


def _show_output(stream: BinaryIO, of_rank_0: bool) -> None:
    """Print the ranks' stdout, or rank 0's. mpirun ends its ranks if it cannot write their output."""
    for rank, piece in by_rank(_chunks(stream)):
        if not of_rank_0 or not rank:
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
