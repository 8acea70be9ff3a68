"""A job that loses a rank, watched meanwhile by others: on a terminal, through a pipe, and in its report."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvd_cifar.reporting import goodput
from hvd_cifar.reporting.run_files import Ranks, read_run
from hvd_cifar.tools.report import content
from tests.faults.jobs import start
from tests.options import PACE
from tests.ranks import CHECKOUT, environment

STEPS = 240
HOLD = """
import time
import hvd_cifar

class Hold(hvd_cifar.Callback):
    \"\"\"Keeps a run's first start between two checkpoints, after a sign of life.\"\"\"

    def on_start(self, run):
        self.is_first = run.step == 0

    def on_step(self, run):
        while self.is_first and run.step == 190:
            time.sleep(1)
"""


@dataclass
class Seen:
    """What was seen of the job: its folder, its output, and what the watchers printed before they ended with a code."""

    run_dir: Path
    said: str
    drawn: str
    piped: str
    codes: list[int]


def _watch(run_dir: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "hvd_cifar.launch", "watch", str(run_dir), *options]


def _read(descriptor: int, into: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # of a terminal whose program has ended
        while data := os.read(descriptor, 4096):
            into.append(data)


def _lives_after_its_checkpoint(run_dir: Path) -> bool:
    """Whether a sign of life tells of steps that a restart will repeat."""
    path = run_dir / goodput.SESSIONS
    marks = goodput.read(path.read_text()) if path.exists() else []
    return bool(marks) and marks[-1]["mark"] == "checkpoints" and path.stat().st_mtime > marks[-1]["time"] + 0.1


@pytest.fixture(scope="module")
def seen(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """A job of two ranks, one of which is killed; a terminal and a pipe watch it from its first steps on."""
    run_dir = tmp_path_factory.mktemp("runs") / "run"
    options = ["--max-steps", STEPS, "--checkpoint-every", 100, "--quiet"]
    program = run_dir.with_name("hold.py")
    program.write_text(HOLD)
    pace = ["--callbacks", f"{PACE},{program}:Hold"]
    job = start(["-np", 2, "--max-restarts", 1], embedded, run_dir, *options, pace=pace)
    screen, terminal = pty.openpty()
    drawn: list[bytes] = []
    reader = threading.Thread(target=_read, args=[screen, drawn], daemon=True)
    watchers: list[subprocess.Popen[bytes]] = []
    try:
        job.wait_for_step(10)
        env = environment({"COLUMNS": "100", "LINES": "30", "TERM": "xterm"})
        watchers.append(subprocess.Popen(_watch(run_dir), stdout=terminal, stderr=terminal, env=env, cwd=CHECKOUT))
        os.close(terminal)
        reader.start()
        watchers.append(subprocess.Popen(_watch(run_dir), stdout=subprocess.PIPE, env=env, cwd=CHECKOUT))
        job.wait_until(lambda: _lives_after_its_checkpoint(run_dir))
        job.send(signal.SIGKILL, "rank 1")
        assert job.wait() == 0, job.said()
        piped = watchers[1].communicate(timeout=120)[0].decode()
        codes = [watcher.wait(120) for watcher in watchers]
        reader.join(10)
        yield Seen(run_dir, job.said(), b"".join(drawn).decode(errors="replace"), piped, codes)
    finally:
        job.end()
        for watcher in watchers:
            watcher.kill()
        os.close(screen)


def test_a_pipe_gets_plain_lines_until_the_run_ends(seen: Seen) -> None:
    lines = [re.sub(r"^\d{4}-\S+ \S+ ", "", line) for line in seen.piped.splitlines()]
    steps = [int(match[1]) for line in lines if (match := re.match(r"step (\d+), loss = \d", line))]
    gone = next(i for i, line in enumerate(lines) if "its process is gone; a launcher may start it again" in line)
    killed = next(i for i, line in enumerate(lines) if "was ended by signal 9 (Killed)" in line)
    assert lines[0] == "the run starts on 2 ranks" and "\x1b" not in seen.piped
    assert gone < killed and lines[killed].startswith("the run is cut off after step ")
    back = next(line for line in lines[killed:] if line.startswith("the run goes on after step "))
    assert re.fullmatch(r"the run goes on after step [1-9]\d*0 on 2 ranks", back)
    assert steps[-1] == STEPS and any(line.startswith(f"step {STEPS} (epoch") for line in lines)
    assert lines[-1] == f"{seen.run_dir}: the run is complete after step {STEPS}" and seen.codes[1] == 0


def test_a_terminal_shows_the_newest_values_and_each_rank(seen: Seen) -> None:
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.drawn)
    assert f"step {STEPS} of {STEPS}" in shown and "0:00:00 left" in shown
    assert re.search(r"loss \d\.\d{4}   test accuracy \d+\.\d\d%   [\d,]+ images/s   learning rate ", shown)
    assert re.search(r"rank 0 on \S+ .*computes \d+\.\d ms a step, waits \d+\.\d ms", shown)
    assert re.search(r"rank 1 on \S+ .*computes ", shown)
    assert not re.search(r"step \d+, loss = ", shown)  # the view has these
    assert f"the run is complete after step {STEPS}" in shown.splitlines()[-1] and seen.codes[0] == 0


def test_a_quiet_job_prints_what_goes_wrong_alone(seen: Seen) -> None:
    lines = seen.said.splitlines()
    assert lines and all(line.startswith("hvd_cifar: ") for line in lines), seen.said
    assert any("restart 1 of 1" in line for line in lines)
    (killed,) = (line for line in lines if " was ended by signal 9 (Killed)" in line)
    assert re.match(r"hvd_cifar: rank 1 on \S+ was ended", killed) and "mpirun" not in seen.said


def test_files_of_the_run_tell_what_a_report_needs(seen: Seen) -> None:
    run = read_run(seen.run_dir)
    assert run.standing.word == "complete" and run.summary and run.damaged == 0
    assert [one.kind for one in content.happenings(run)] == ["start", "failure", "resume", "end"]
    assert all(len(event.hosts) == len(event.compute_seconds) == 2 for event in run.of_kind(Ranks))
    rows, slowest = content.by_rank(run)
    assert slowest.startswith("Rank ") and rows[0].compute > 0
    assert {"useful steps", "set up", "restart", "repeated steps"} <= {kind for _, kind, *_ in content.shares(run)}


def test_what_watches_ends_at_once_after_the_end(seen: Seen, tmp_path: Path) -> None:
    words = _watch(seen.run_dir, "--quiet")
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=CHECKOUT, timeout=120)
    assert (done.returncode, done.stdout) == (0, f"{seen.run_dir}: the run is complete after step {STEPS}\n")
    words = _watch(tmp_path)
    none = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=CHECKOUT, timeout=120)
    assert none.returncode == 2 and len(none.stderr.splitlines()) == 1
    assert "there is no run (no config.json); give the folder of a run" in none.stderr
