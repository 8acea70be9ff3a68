"""A rank that is lost, with --max-restarts; and when a job does not start again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.launch.restarts import Failure, failure_of, last_step, reason_to_give_up, seconds_before
from tests.faults.jobs import start

KILLED = "hvd_cifar: rank 1 on a was ended by signal 9 (Killed)"


@pytest.mark.parametrize(
    ("failures", "max_restarts", "reason"),
    [
        ([Failure(137, KILLED, 20)], 1, None),
        ([Failure(137, KILLED, 20)], 0, "--max-restarts 0"),
        ([Failure(137, KILLED, 20), Failure(137, KILLED, 30)], 5, None),
        ([Failure(137, KILLED, 20), Failure(1, "", 20)], 5, None),
        ([Failure(137, KILLED, 20), Failure(1, "", 20), Failure(137, KILLED, 20, 9)], 5, "same way after step 20"),
        # A host is away, and mpirun cannot start a rank: nothing is known of the program.
        ([Failure(137, KILLED, 20, 9), Failure(255, "", 20, 9), Failure(255, "", 20, 9)], 5, None),
        ([Failure(137, KILLED, None), Failure(137, KILLED, None)], 5, None),  # rank 0 writes on another host
        ([Failure(1, "hvd_cifar: rank 1 ended first", 2, diverged=True)], 5, "would not be finite again"),
    ],
)
def test_when_a_job_does_not_start_again(failures: list[Failure], max_restarts: int, reason: str | None) -> None:
    found = reason_to_give_up(failures, max_restarts)
    assert found is None if reason is None else found is not None and reason in found


def test_a_failure_is_its_last_line_and_its_last_whole_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 20}\n{"event": "tr')
    tail = f"cut off\nhvd_cifar: note\n{KILLED}\nother\n".encode()
    assert failure_of(137, tail, tmp_path) == Failure(137, KILLED, 20)
    (tmp_path / "sessions.jsonl").write_text('{"mark": "launch"}\n{"mark": "start"}\n')
    assert failure_of(137, tail, tmp_path).marks == 2
    assert failure_of(1, b"", tmp_path / "none") == Failure(1, "", None)
    diverged = b"rank 1 on b: hvd_cifar: model diverged with loss = nan; ...\nhvd_cifar: rank 0 lost another rank\n"
    assert failure_of(1, diverged, tmp_path / "none").diverged


def test_only_the_end_of_metrics_is_read(tmp_path: Path) -> None:
    """An elastic job looks each second."""
    metrics = tmp_path / "metrics.jsonl"
    evaluations = '{"event": "evaluation", "step": 8}\n' * 5000  # longer than what is read first
    metrics.write_text('{"event": "train", "step": 7}\n' * 500_000 + evaluations)
    before = _bytes_read()
    assert last_step(metrics) == 7
    assert _bytes_read() - before < 2**20 < metrics.stat().st_size / 8
    metrics.write_text(evaluations)
    assert last_step(metrics) is None


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def test_waits_double_up_to_a_minute() -> None:
    assert [seconds_before(restart) for restart in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]


def test_the_same_failure_ends_the_job_and_a_user_s_error_is_not_repeated(embedded: Path, tmp_path: Path) -> None:
    """Rank 1 kills itself at step 25 of each life, before any checkpoint."""
    program = tmp_path / "deadly.py"
    program.write_text(
        "import os, signal\nimport hvd_cifar\n"
        "class Deadly(hvd_cifar.Callback):\n"
        "    def on_step(self, run):\n"
        "        if run.step == 25 and run.world.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher: list[Any] = ["-np", 2, "--max-restarts", 5]
    running = start(launcher, embedded, tmp_path / "run", "--callbacks", f"{program}:Deadly")
    assert running.wait() == 128 + signal.SIGKILL
    said = running.said()
    assert said.count("restart 1 of 5 in 1 s") == 1 and "restart 2" not in said, said
    assert "does not start again: it failed twice in the same way after step 25" in said
    alone = ["-np", 1, *launcher[2:]]
    wrong = start(alone, embedded, tmp_path / "run", "--seed", 3, "--global-batch-size", 32)
    assert wrong.wait() == 2
    assert "seed was 0, is 3" in wrong.said() and wrong.said().count("restart") == said.count("restart")
