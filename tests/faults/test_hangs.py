"""Ranks that deadlock or do not start: named by the others, and the run ends. A pause of all is no hang."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from hvd_cifar.errors import STALLED
from hvd_cifar.runtime.watch import HANGS, SILENT
from tests.faults.jobs import start
from tests.ranks import environment


class Named(NamedTuple):
    """A rank that a line names as lost."""

    rank: int
    host: str
    step: int
    phase: str
    reason: str


def named_in(text: str) -> list[Named]:
    """The ranks that lines name as lost, each once."""
    return [Named(int(r), h, int(s), *more) for r, h, s, *more in dict.fromkeys(HANGS.findall(text))]


FAULTS = """
import threading
import hvd_cifar

class Faulty(hvd_cifar.Callback):
    def on_start(self, run):
        self.is_first = run.step == 0

    def on_step(self, run):
        if self.is_first and run.step == 20 and run.world.rank == 1:
            threading.Event().wait()
"""


def test_a_job_starts_again_after_a_hang(embedded: Path, tmp_path: Path) -> None:
    """Rank 1 deadlocks in a callback. A host that does not answer: `cluster/test_hangs`."""
    program = tmp_path / "faults.py"
    program.write_text(FAULTS)
    options = ["--max-steps", 30, "--checkpoint-every", 10, "--eval-every", 0, "--stall-seconds", 3]
    pace = ["--callbacks", f"{program}:Faulty"]
    running = start(["-np", 2, "--max-restarts", 1], embedded, tmp_path / "run", *options, pace=pace)
    try:
        running.wait_until(lambda: running.has_said("restart 1 of 1 in"))
        (lost,) = named_in(running.said())
        assert (lost.rank, lost.step, lost.phase) == (1, 20, "Faulty.on_step")
        assert lost.reason == "the other ranks wait for it" and running.has_said("no progress for 3 s")
        stacks = tmp_path / "run" / "stalls"
        assert 'faults.py", line 11 in on_step' in (stacks / "step-20-rank-1.txt").read_text()
        assert sorted(path.name for path in stacks.iterdir()) == ["step-20-rank-1.txt", "step-21-rank-0.txt"]
        assert running.wait() == 0 and not running.left()
    finally:
        running.end()
    assert "Traceback" not in running.said() and "stall_inspector" not in running.said()


# A rank without TensorFlow: it waits as in Horovod's start, makes steps, or waits for a rank that never answers.
ALONE = """
import socket, sys, threading, time
from hvd_cifar.runtime import watch

watch.GAP, watch.ANSWER_SECONDS = 1.0, 1.0
phase, own = sys.argv[1], watch.Watch(float(sys.argv[2]))
if phase == "steps":
    for step in range(5):
        own.mark("step", step)
        print(step, flush=True)
        for _ in range(60):
            time.sleep(0.01)
    sys.exit()
if phase != "start-up":
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, as the kernel does for a stopped process
    own.peers = [own.listen(0, one_host=True), watch.Peer("b", silent.getsockname())]
    own.mark(phase, 21)
threading.Event().wait()
"""


def _alone(phase: str, seconds: float) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", ALONE, phase, str(seconds)]
    return subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("phase", "rank", "reason"),
    [
        ("start-up", 0, "no progress"),  # there is no channel between the ranks yet
        ("step", 1, SILENT),
        ("shutdown", 1, SILENT),
    ],
)
def test_the_rank_that_holds_up_the_others_is_named(phase: str, rank: int, reason: str) -> None:
    """What a silent one does is not known: step and phase are those of the rank that waits for it."""
    _, said = (process := _alone(phase, 0.05)).communicate(timeout=60)
    (lost,) = named_in(said)
    assert process.returncode == STALLED and "Traceback" not in said, said
    assert (lost.rank, lost.phase, lost.reason) == (rank, phase, reason)


def test_a_pause_of_all_is_no_hang() -> None:
    """As on a laptop that sleeps."""
    process = _alone("steps", 0.4)
    assert process.stdout
    while process.stdout.readline() != "2\n":
        assert process.poll() is None
    for number, seconds in ((signal.SIGSTOP, 3), (signal.SIGCONT, 0)):
        process.send_signal(number)
        time.sleep(seconds)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (0, "")
