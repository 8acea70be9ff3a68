"""Ranks that stop, freeze, deadlock, are late or slow: named by the others, and the run ends, or goes on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from hvd_cifar.errors import STALLED
from hvd_cifar.runtime.stalls import Lost, lost_ranks
from tests.faults.jobs import Running, start

SECONDS = 4  # --stall-seconds
LATEST = 30  # s after it: the run has ended
RESTARTS = ("--max-steps", 100, "--checkpoint-every", 25, "--eval-every", 0)
# Faults of rank 1, each called at step 20.
FAULTS = """
import atexit, ctypes, os, signal, threading, time
import hvd_cifar

def frozen():  # with Python's lock held
    ctypes.PyDLL(None).sleep(10_000)

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def slow():
    end = time.monotonic() + 16
    while time.monotonic() < end:
        pass

def lingers():  # until the job starts again after step 20
    Faulty.on_step = lambda self, run: time.sleep(0.2)

def stops_at_exit():
    atexit.register(os.kill, os.getpid(), signal.SIGSTOP)

class Faulty(hvd_cifar.Callback):
    def on_step(self, run):
        if run.step == 20 and run.world.rank == 1:
            print("the fault begins", flush=True)
            {fault}()
"""


@pytest.fixture
def job(embedded: Path, tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a job that trains in `tmp_path`/run, with a fault of rank 1 or without."""
    jobs: list[Running] = []

    def begin(launcher: list[Any], *options: Any, fault: str = "") -> Running:
        if fault:
            program = tmp_path / "faults.py"
            program.write_text(FAULTS.replace("{fault}", fault))
            options = (*options, "--callbacks", f"{program}:Faulty")
        jobs.append(start(launcher, embedded, tmp_path / "run", "--stall-seconds", SECONDS, *options))
        return jobs[-1]

    yield begin
    for running in jobs:
        running.end()


def end_of(running: Running, begins: Callable[[], bool], limit: float) -> tuple[Lost, str]:
    """Wait for a fault and the job's end; the rank that is named, and all that the job has said."""
    running.wait_until(begins)
    began = time.monotonic()
    assert running.wait() == STALLED, running.said()
    assert time.monotonic() - began < limit + LATEST, running.said()
    said = running.said()
    assert f"no progress for {SECONDS} s" in said, said
    assert not running.left() and "Traceback" not in said and "stall_inspector" not in said, said
    (lost,) = lost_ranks(said)
    return lost, said


def test_a_stopped_rank_is_named_and_the_job_starts_again(job: Any, tmp_path: Path) -> None:
    """Three ranks over MPI, with stacks of the two that answer."""
    running = job(["-np", 3, "--max-restarts", 1], *RESTARTS, fault="lingers")
    running.wait_for_step(30)
    running.send(signal.SIGSTOP, "rank 1")
    began = time.monotonic()
    running.wait_until(lambda: running.has_said("restart 1 of 1 in"))
    assert time.monotonic() - began < SECONDS + LATEST
    assert running.has_said(f"no progress for {SECONDS} s")
    (lost,) = lost_ranks(running.said())
    assert (lost.rank, lost.phase) == (1, "step") and lost.step > 30 and "stopped (SIGSTOP" in lost.reason
    assert running.wait() == 0, running.said()
    (stacks,) = (tmp_path / "run" / "stalls").iterdir()
    text = stacks.read_text()
    assert text.startswith(str(lost)) and "=== rank 0" in text and "=== rank 2" in text and "=== rank 1" not in text
    assert 'trainer.py", line' in text and f"step, step {lost.step}" in text


def test_a_stopped_starter_is_named_and_the_job_starts_again(job: Any) -> None:
    """mpirun, which forwards all that ranks print, and which nobody but the launcher watches."""
    running = job(["-np", 2, "--max-restarts", 1], *RESTARTS, fault="lingers")
    running.wait_for_step(30)
    running.send(signal.SIGSTOP, "starter")
    began = time.monotonic()
    running.wait_until(lambda: running.has_said("restart 1 of 1 in"))
    assert time.monotonic() - began < SECONDS + LATEST and running.has_said("mpirun is stopped (SIGSTOP or a debugger)")
    assert running.wait() == 0 and not running.left(), running.said()


@pytest.mark.parametrize("fault", ["frozen", "deadlock"])
def test_python_stands_still(fault: str, job: Any, tmp_path: Path) -> None:
    """While Horovod's thread lives. A frozen Python does not answer; a deadlocked one shows its stack."""
    running = job(["-np", 2], fault=fault)
    lost, _ = end_of(running, lambda: running.has_said("the fault begins"), SECONDS)
    (stacks,) = (tmp_path / "run" / "stalls").iterdir()
    if fault == "frozen":  # what it does is not known: the step and phase are those of the rank that waits for it
        assert (lost.rank, lost.step, lost.phase) == (1, 21, "step")
        assert lost.reason.startswith("its Python does not run")
    else:
        assert (lost.rank, lost.step, lost.phase) == (1, 20, "Faulty.on_step")
        assert lost.reason == "the other ranks wait for it" and "in deadlock" in stacks.read_text()


def test_slow_ranks_and_a_pause_of_all_are_no_hang(job: Any) -> None:
    """Rank 1 computes for two time-outs. Later both stand still, as on a laptop that sleeps, and rank 1 for longer."""
    running = job(["-np", 2], "--stall-seconds", 6, "--eval-every", 0, fault="slow")
    running.wait_until(lambda: running.has_said("rank 1 on"))
    running.wait_for_step(30)
    both = running.ranks()
    for number, rank, seconds in (("STOP", 0, 0), ("STOP", 1, 7), ("CONT", 0, 5), ("CONT", 1, 0)):
        both[rank].send_signal(signal.Signals[f"SIG{number}"])
        time.sleep(seconds)
    running.wait_for_step(max(runs.losses(running.run_dir)) + 30)
    said = running.said()
    assert said.count("is slow at step 20 (Faulty.on_step)") == 1 and not lost_ranks(said)


def test_a_rank_that_does_not_arrive(job: Any, embedded: Path, tmp_path: Path) -> None:
    """It is stopped while it imports TensorFlow: there is no channel between the ranks yet."""
    running = start(["-np", 2], embedded, tmp_path / "run", "--stall-seconds", 1)
    try:
        running.wait_until(lambda: len(running.ranks()) == 2)
        running.send(signal.SIGSTOP, "rank 1")
        assert running.wait(100) == STALLED
    finally:
        running.end()
    (lost,) = lost_ranks(running.said())
    assert (lost.rank, lost.phase) == (1, "start-up") and "stopped (SIGSTOP" in lost.reason
    assert not running.left()


def test_a_rank_that_does_not_end(job: Any, tmp_path: Path) -> None:
    """All is written; it stops while Python ends."""
    running = job(["-np", 2], "--max-steps", 30, fault="stops_at_exit")
    lost, _ = end_of(running, (tmp_path / "run" / "summary.json").exists, SECONDS + 5)
    assert (lost.rank, lost.phase) == (1, "shutdown") and "stopped (SIGSTOP" in lost.reason
