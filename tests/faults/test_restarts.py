"""A rank that is lost, with --max-restarts; and when a job does not start again."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.launch.job import Job
from hvd_cifar.launch.jobs import END_BYTES, Ends, last_step
from tests.faults.jobs import start


def test_the_last_words_and_the_last_whole_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"event": "train", "step": 20}\n{"event": "evaluation", "step": 25}\n{"event": "tr')
    assert last_step(tmp_path) == 20 and last_step(tmp_path / "none") is None
    metrics.write_text('{"event": "train", "step": 7}\n' + " " * 2 * END_BYTES)
    assert last_step(tmp_path) is None  # only the end is read
    job, said = Job(can_stop=False), "rank 1 on a was ended by signal 9 (Killed)"
    assert job.last_words == ""
    job.tail = f"cut off\nhvd_cifar: note\nhvd_cifar: {said}\nother\n".encode()
    assert job.last_words == said and Ends().why_no_other_start(job.tail) == ""
    diverged = b"rank 1 on b: hvd_cifar: model diverged with loss = nan; ...\nhvd_cifar: rank 0 lost another\n"
    assert Ends().why_no_other_start(diverged) == "it would fail in the same way"


@pytest.mark.parametrize(
    ("steps", "ends"),
    [([5, 5, 5], True), ([-1, 9, 9, 9], True), ([5, 5, 6], False), ([5, 5, None, 5], False), ([None] * 9, False)],
)
def test_three_starts_in_a_row_without_a_step_are_the_last(steps: list[int | None], ends: bool) -> None:
    seen = Ends()
    for step in steps:
        assert seen.why_no_other_start(b"") == ""
        seen.add(step)
    assert (seen.why_no_other_start(b"") == "3 starts in a row ended after the same step") == ends


@pytest.mark.slow  # `test_hangs` and `test_horovod_examples` have restarts that go on
def test_the_same_failure_ends_the_job_and_a_user_s_error_is_not_repeated(embedded: Path, tmp_path: Path) -> None:
    """The rank kills itself at step 5 of each life, before any checkpoint."""
    program = tmp_path / "deadly.py"
    program.write_text(
        "import os, signal\nimport hvd_cifar\n"
        "class Deadly(hvd_cifar.Callback):\n"
        "    def on_step(self, run):\n"
        "        if run.step == 5:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    launcher: list[Any] = ["-np", 1, "--max-restarts", 5]
    running = start(launcher, embedded, tmp_path / "run", "--callbacks", f"{program}:Deadly")
    assert running.wait() == 128 + signal.SIGKILL
    said = running.said()
    assert said.count("restart 2 of 5 in 2 s") == 1 and "restart 3" not in said, said
    assert "does not start again: 3 starts in a row ended after the same step" in said
    wrong = start(launcher, embedded, tmp_path / "run", "--seed", 3, "--global-batch-size", 32)
    assert wrong.wait() == 2
    assert "seed was 0, is 3" in wrong.said() and wrong.said().count("restart") == said.count("restart")
