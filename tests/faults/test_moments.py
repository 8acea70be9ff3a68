"""Ranks that are killed at chosen moments, some at once: the job ends with the weights of one left alone."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import runs
from tests.faults.jobs import COURSE, Running, start
from tests.options import PACE
from tests.run_dirs import examples

OPTIONS = [*COURSE, "--checkpoint-every", 25, "--eval-every", 25, "--record-examples"]
COPIES = "ElasticCopies.on_step"
MOMENTS = ("step", "all-reduce", COPIES, "evaluation", "checkpoints", "shutdown")  # phases of a rank
# Kills its own process at the moments that files of a folder name, each once: `NUMBER RANK SECONDS PHASE`.
PROGRAM = """
import os, pathlib, signal, threading, time
import hvd_cifar
from hvd_cifar.runtime.watch import Watch

class Deadly(hvd_cifar.Callback):
    def on_start(self, run):
        threading.Thread(target=self.wait, args=[run], daemon=True).start()

    def wait(self, run):
        watch = Watch._current
        for moment in sorted(pathlib.Path("{plan}").iterdir()):
            number, rank, seconds, phase = moment.name.split(maxsplit=3)
            if int(rank) % run.world.size != run.world.rank:
                return  # the rank that it is meant for ends this life
            while run.step < int(number) or not self.is_in(phase, watch):
                time.sleep(0.0005)
            time.sleep(float(seconds))
            print(f"rank {run.world.rank} dies: {phase}, step {run.step}", flush=True)
            moment.unlink()
            os.kill(os.getpid(), 9)

    def is_in(self, phase, watch):
        if phase == "all-reduce":
            return watch._phase == "step" and watch.waits_in_step()
        return watch._phase == phase
"""


# The slot of a lost rank does not rest: two ranks go on. That fewer go on: `test_elastic`.
ELASTIC = ["--elastic", "1:2", "--cool-down", "0:0"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # some twenty ranks start, one after the other
def test_killed_at_each_moment(alone: Path, embedded: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """One rank at each moment, one at the start, both at once, and what starts them."""
    seed = random.randrange(1000)
    print(f"seed {seed}")
    chance = random.Random(seed)
    plan = tmp_path / "plan"
    plan.mkdir()
    for number, phase in enumerate(MOMENTS, 1):
        rank = 0 if phase == COPIES else chance.randrange(2)  # which alone copies, of a host's ranks
        (plan / f"{number * 25 + 35:03} {rank} {chance.uniform(0, 0.002):.4f} {phase}").touch()
    program = tmp_path / "deadly.py"
    program.write_text(PROGRAM.replace("{plan}", str(plan)))
    shared, sessions = tmp_path / "shm", tmp_path / "tmp"
    for folder, variable in ((shared, "OMPI_MCA_btl_vader_backing_directory"), (sessions, "TMPDIR")):
        folder.mkdir()
        monkeypatch.setenv(variable, str(folder))
    job = start(ELASTIC, embedded, tmp_path / "run", *OPTIONS, "--callbacks", f"{PACE},{program}:Deadly")
    try:
        job.wait_until(lambda: len(job.ranks()) == 2)
        copies = job.copies()
        _kill_while_starting(job, chance)
        job.wait_for_step(5)
        _kill_at_once(job.starters())
        assert job.wait(1200) == 0, job.said()
    finally:
        job.end()
    said = job.said()
    assert not list(plan.iterdir()) and said.count(" dies: ") == len(MOMENTS) and "Traceback" not in said, said
    assert "resumed from memory at step" in said and not job.left() and not copies.exists()
    assert not list(shared.iterdir()) and not list(sessions.glob("ompi.*/pid.*"))
    assert runs.losses(job.run_dir) == runs.losses(alone)
    assert runs.summary(job.run_dir)["weights_sha256"] == runs.summary(alone)["weights_sha256"]
    assert examples(job.run_dir) == examples(alone)


def _kill_while_starting(job: Running, chance: random.Random) -> None:
    """One rank while it imports TensorFlow, and both in a step; the job is then about to start ranks again."""
    job.send(signal.SIGKILL, f"rank {chance.randrange(2)}")
    job.wait_for_step(5)
    job.wait_until(lambda: len(job.ranks()) == 2)
    job.wait_for_step(max(runs.losses(job.run_dir)) + 3)
    _kill_at_once(job.ranks().values())
    job.wait_until(lambda: job.said().count(" is lost") >= 2)
    job.wait_until(lambda: bool(job.starters()))


def _kill_at_once(processes: Iterable[psutil.Process]) -> None:
    found = list(processes)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for process in found:
            process.send_signal(number)
