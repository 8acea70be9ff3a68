"""Jobs that stay alive and take turns on one machine: one runs, the others are stopped where they are (SIGSTOP)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from benchmarks.peers.rates import Stamp, rate
from tests.cluster.hosts import Cluster

POLL_SECONDS = 0.004  # how late a line may be seen; looking costs microseconds
START_SECONDS = 300.0  # to the first lines
SILENCE_SECONDS = 120.0  # between lines, once there are some


@dataclass(frozen=True)
class Side:
    """What is measured: processes that train at the same time, and the metrics.jsonl that each of them writes.

    images_per_step: of each process, on average over an epoch. environment: variables besides those of this process.
    """

    name: str
    commands: Sequence[Sequence[str]]
    metrics: Sequence[Path]
    images_per_step: float
    environment: Mapping[str, str] = field(default_factory=dict)


class Turn(NamedTuple):
    """The outcome of a side's turn."""

    rate: float  # images per second of all its processes together
    others: float  # the share of the machine's cores that went to anything else, other virtual machines included


class Job:
    """A side while it lives. Use it as a context: its processes end with the block."""

    def __init__(self, side: Side, folder: Path, cwd: Path, hosts: Cluster | None = None) -> None:
        self.side = side
        self.hosts = hosts  # of this side alone: ranks started by an sshd are found by host, not below the launcher
        self.log = folder / "log"
        self._cwd = cwd
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watches = [_Watch(path) for path in side.metrics]

    def __enter__(self) -> Job:
        with ExitStack() as undo, self.log.open("wb") as log:
            undo.callback(self.__exit__)  # where a command cannot be started, or SIGTERM comes, those before it end
            own: dict[str, Any] = {"cwd": self._cwd, "env": {**os.environ, **self.side.environment}}
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            for words in self.side.commands:
                self._processes.append(subprocess.Popen(list(words), **pipes, **own, start_new_session=True))
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._tree():
            _send(process, signal.SIGKILL)
        for started in self._processes:
            started.wait()

    def _tree(self) -> list[psutil.Process]:
        """Launchers and all that they have started, and all processes of the side's hosts."""
        found = []
        for started in self._processes:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(started.pid)
                found += [root, *root.children(recursive=True)]
        found += [process for host in self.hosts or () for process in host.processes()]
        return [*dict.fromkeys(found)]

    def pause(self) -> None:
        """Stop every process; returns when all have stopped."""
        tree = self._tree()
        for process in tree:
            _send(process, signal.SIGSTOP)
        until = time.monotonic() + 10
        while any(_runs(process) for process in tree):
            if time.monotonic() > until:
                raise RuntimeError(f"{self.side.name}: a process does not stop")
            time.sleep(POLL_SECONDS)

    def wake(self) -> None:
        """Let every process go on."""
        for process in reversed(self._tree()):  # the ranks before the launcher that looks after them
            _send(process, signal.SIGCONT)

    def run_for(self, seconds: float, least: int) -> list[list[Stamp]]:
        """The stamps of each process over `seconds`, or longer until each has `least` of them.

        Raises:
            SystemExit: where a process ends or falls silent, with the end of its output.
        """
        for watch in self._watches:
            watch.look()
        found: list[list[Stamp]] = [[] for _ in self._watches]
        began = last = time.monotonic()
        while (now := time.monotonic()) < began + seconds or any(len(stamps) < least for stamps in found):
            for watch, stamps in zip(self._watches, found, strict=True):
                if new := watch.look():
                    stamps.append(Stamp(now, new[-1]))
                    last = now
            if now - last > (SILENCE_SECONDS if all(found) else START_SECONDS):
                raise SystemExit(f"{self.side.name} has told of no step for {now - last:.0f} s{self._tail()}")
            if any(process.poll() is not None for process in self._processes):
                raise SystemExit(f"{self.side.name} ended while it was measured{self._tail()}")
            time.sleep(POLL_SECONDS)
        return found

    def take_turn(self, seconds: float) -> Turn:
        """Measure over `seconds`; the processes keep running."""
        began, busy, own = time.monotonic(), _busy_seconds(), self._own_seconds()
        found = self.run_for(seconds, 3)
        available = (time.monotonic() - began) * (psutil.cpu_count() or 1)
        others = (_busy_seconds() - busy) - (self._own_seconds() - own)
        return Turn(sum(rate(stamps, self.side.images_per_step) for stamps in found), max(0.0, others / available))

    def _own_seconds(self) -> float:
        """CPU seconds that this job's processes have had."""
        total = 0.0
        for process in self._tree():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-20:]
        return "\n".join([f"; the end of {self.log}:", *lines])


class _Watch:
    """The new lines of a file that another process writes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None
        self._rest = ""

    def look(self) -> list[int]:
        """The steps of the training events that were written since the last look."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open(encoding="utf-8")
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        events = [json.loads(line) for line in lines]
        return [event["step"] for event in events if event["event"] == "train"]


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def _busy_seconds() -> float:
    """CPU seconds of this machine that were not idle, including those that its hypervisor took (steal)."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
