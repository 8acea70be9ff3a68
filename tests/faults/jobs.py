"""Jobs of the launcher that tests disturb: started, watched, signalled, and looked for afterwards."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import runs
from hvd_cifar.runtime.environment import elastic_job
from hvd_cifar.runtime.shared_memory import folder_of
from hvd_cifar.training import checkpoint
from tests.options import PACE, SMALL
from tests.ranks import CHECKOUT, environment, processes_of

PACED = ("--callbacks", PACE)
# The same weights on any number of ranks: those of the fixture `alone`.
STEPS = 240
COURSE = ("--virtual-shards", 2, "--global-batch-size", 32, "--max-steps", STEPS, "--log-every", 1)


@dataclass
class Running:
    """A job: the launcher's process, the run directory, and the file of all it prints."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    output: Path

    def said(self) -> str:
        """All that the job has printed so far."""
        return self.output.read_text(errors="replace")

    def has_said(self, text: str) -> bool:
        """Whether the job has printed this text."""
        return text in self.said()

    def left(self) -> list[str]:
        """The command lines of its processes that still run."""
        return processes_of(self.run_dir)

    def ranks(self) -> dict[int, psutil.Process]:
        """Its ranks."""
        found = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                words, env = process.cmdline(), process.environ()
                number = env.get("OMPI_COMM_WORLD_RANK")
                if "hvd_cifar" in words and number is not None:
                    found[int(number)] = process
        return found

    def copies(self) -> Path:
        """The folder of the copies of its state, of an elastic job whose ranks run."""
        job = elastic_job(next(iter(self.ranks().values())).environ())
        assert job, "the job is elastic"
        return folder_of(job.name)

    def starters(self) -> list[psutil.Process]:
        """The launcher's children that start ranks, or are the only one."""
        return [child for child in psutil.Process(self.process.pid).children() if "hvd_cifar" in child.cmdline()]

    def send(self, number: signal.Signals, target: str = "launcher") -> None:
        """Send a signal to the launcher, to mpirun or the starter, or to `rank N`."""
        if target == "launcher":
            self.process.send_signal(number)
        elif target.startswith("rank"):
            self.ranks()[int(target.split()[1])].send_signal(number)
        else:
            (starter,) = self.starters()
            starter.send_signal(number)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 200) -> None:
        """Wait until something holds; fails where the job ends before."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None and time.monotonic() < end, self.said()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step of at least this number is logged."""
        self.wait_until(lambda: max(runs.losses(self.run_dir), default=0) >= step)

    def wait(self, seconds: float = 250) -> int:
        """The exit code."""
        return self.process.wait(seconds)

    def end(self) -> None:
        """End what is left of it."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.kill()
        self.process.wait()


def start(
    launcher: list[Any],
    data: Path,
    run_dir: Path,
    *options: Any,
    net: Sequence[str] = SMALL,
    pace: Sequence[str] = PACED,
) -> Running:
    """Start `train` on the embedded set, at `pace`; without --max-steps it would not end."""
    words = [sys.executable, "-m", "hvd_cifar.launch", *launcher, "train", *net, data, "--run-dir", run_dir]
    words += [*pace, *([] if "--global-batch-size" in options else ["--batch-size", 16])]
    words += ["--log-every", 5, *options]
    output = run_dir.with_suffix(".out")
    with output.open("ab") as file:
        process = subprocess.Popen(
            list(map(str, words)), stdout=file, stderr=file, env=environment(), cwd=CHECKOUT, start_new_session=True
        )
    return Running(process, run_dir, output)


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of its checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in checkpoint.listed(run_dir))
