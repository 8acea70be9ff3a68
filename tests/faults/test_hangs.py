"""Ranks that stop, freeze, deadlock or do not start: named by the others, and the run ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hvd_cifar.errors import STALLED
from hvd_cifar.runtime.watch import HANGS, SILENT, lost_ranks
from tests.faults.jobs import start
from tests.ranks import environment, wait_for

SECONDS = 0.4  # the time-out
# A rank without TensorFlow: it has a watchdog, and meets the other one through files.
RANK = """
import atexit, ctypes, json, os, pathlib, signal, sys, threading, time
from hvd_cifar.runtime import watch as module
from hvd_cifar.runtime.watch import Peer, Watch

module.GAP = 1.0
FAULT, MOMENT, FAULTY, SECONDS, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
waits = False

def meet(name):
    global waits
    waits = True
    pathlib.Path(f"{name}.{RANK}").touch()
    while not all(pathlib.Path(f"{name}.{rank}").exists() for rank in range(2)):
        time.sleep(0.005)
    waits = False

def stopped():
    os.kill(os.getpid(), signal.SIGSTOP)

def frozen():  # with Python's lock held
    ctypes.PyDLL(None).sleep(10_000)

def deadlock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def nothing():
    pass

def fault(moment):
    if (moment, RANK) == (MOMENT, FAULTY):
        globals()[FAULT]()

fault("start")
watch = Watch(SECONDS)
watch.waits_in_step = lambda: waits
if MOMENT == "start":
    deadlock()  # as in Horovod's start, which waits for the others
peer = watch.listen(RANK, one_host=True)
pathlib.Path(f"peer.{RANK}").write_text(json.dumps(peer))
meet("peers")
watch.peers = [Peer(*json.loads(pathlib.Path(f"peer.{rank}").read_text())) for rank in range(2)]
watch.run_dir = pathlib.Path(".")
for step in range(1, 150 if FAULT == "nothing" else 40):
    watch.mark("step", step)
    meet(step)
    with watch.phase("callback"):
        time.sleep(0.03 if FAULT == "nothing" else 0.001)
        if step == 20:
            fault("step")
watch.mark("shutdown")
fault("exit")
meet("exit")
"""


class Started(NamedTuple):
    """Two such ranks, in a folder."""

    folder: Path
    ranks: list[subprocess.Popen[bytes]]

    def said(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))


class Named(NamedTuple):
    """A rank that a line names as lost."""

    rank: int
    host: str
    step: int
    phase: str
    reason: str


# What happens, when and on which rank, and the time-out.
SCENARIOS: dict[str, tuple[Any, ...]] = {
    "rank 0 stops": ("stopped", "step", 0, SECONDS),
    "rank 1 freezes": ("frozen", "step", 1, SECONDS),
    "rank 1 stops at the end": ("stopped", "exit", 1, SECONDS),
    "no rank starts": ("nothing", "start", 1, 0.05),
    "both are stopped for a while": ("nothing", "step", 1, 1.5),
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Started]]:
    """The ranks of all scenarios, which mostly wait, at once."""
    started: dict[str, Started] = {}
    try:
        for number, (name, words) in enumerate(SCENARIOS.items()):
            folder = tmp_path_factory.mktemp("hang")
            started[name] = Started(folder, [])
            for rank in range(2):
                command = [sys.executable, "-c", RANK, *map(str, words), str(rank)]
                env = environment({"OMPI_COMM_WORLD_RANK": str(rank), "PMIX_NAMESPACE": f"test{number}"})
                with (folder / f"{rank}.out").open("wb") as file:
                    # In a session of its own: Linux wakes stopped processes of a group whose session loses its shell.
                    process = subprocess.Popen(
                        command, cwd=folder, env=env, stdout=file, stderr=file, start_new_session=True
                    )
                started[name].ranks.append(process)
        pause = threading.Thread(target=stop_for_a_while, args=[started["both are stopped for a while"]], daemon=True)
        pause.start()
        yield started
    finally:
        for one in started.values():
            for process in one.ranks:
                process.kill()
                process.wait()


def named_in(text: str) -> list[Named]:
    """The ranks that lines name as lost, each once."""
    return [Named(int(r), h, int(s), *more) for r, h, s, *more in dict.fromkeys(HANGS.findall(text))]


def end_of(one: Started, rank: int) -> list[Named]:
    """The ranks that a rank which answers names as lost; it ends with the code for a hang."""
    assert one.ranks[rank].wait(60) == STALLED, one.said()
    assert "no progress for" in one.said() and "Traceback" not in one.said()
    return named_in(one.said())


def test_a_stopped_rank_0_is_named_by_the_other(ranks: Mapping[str, Started]) -> None:
    (lost,) = end_of(one := ranks["rank 0 stops"], 1)
    # What it does is not known: the step and phase are those of the rank that waits for it.
    assert (lost.rank, lost.step, lost.phase) == (0, 21, "step") and lost.reason == SILENT
    assert "no progress for 0 s" in one.said() and [path.name for path in (one.folder / "stalls").iterdir()] == [
        "step-21-rank-1.txt"
    ]


def test_a_frozen_python_is_named(ranks: Mapping[str, Started]) -> None:
    (lost,) = end_of(ranks["rank 1 freezes"], 0)
    assert (lost.rank, lost.step, lost.phase) == (1, 21, "step") and lost.reason == SILENT


def test_a_rank_that_does_not_end(ranks: Mapping[str, Started]) -> None:
    (lost,) = end_of(ranks["rank 1 stops at the end"], 0)
    assert (lost.rank, lost.phase) == (1, "shutdown") and lost.reason == SILENT


def test_a_start_that_does_not_end(ranks: Mapping[str, Started]) -> None:
    """There is no channel between the ranks yet."""
    named = end_of(ranks["no rank starts"], 0)
    assert named and all((lost.phase, lost.reason) == ("start-up", "no progress") for lost in named)


def test_a_pause_of_all_is_no_hang(ranks: Mapping[str, Started]) -> None:
    one = ranks["both are stopped for a while"]
    assert [process.wait(60) for process in one.ranks] == [0, 0], one.said()
    assert (one.folder / "paused").exists() and not lost_ranks(one.said())


def stop_for_a_while(one: Started) -> None:
    """As on a laptop that sleeps; rank 1 sleeps for longer, but for less than the time-out after the other one."""
    wait_for((one.folder / "20.0").exists, "step 20")
    for number, rank, seconds in (("STOP", 0, 0), ("STOP", 1, 1.8), ("CONT", 0, 1.1), ("CONT", 1, 0)):
        one.ranks[rank].send_signal(signal.Signals[f"SIG{number}"])
        time.sleep(seconds)
    (one.folder / "paused").touch()


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
    """Rank 1 deadlocks in a callback."""
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
