"""A rank that is lost, with --max-restarts; and when a job does not start again."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvd_cifar.launch.command import parse
from hvd_cifar.launch.job import Job, Starter
from hvd_cifar.launch.jobs import END_BYTES, Ends, _restart, last_step


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


@pytest.mark.parametrize(("code", "starts", "said"), [(137, 2, "3 starts in a row"), (2, 1, "restart 1 of 5 in 1 s")])
def test_the_same_failure_ends_the_job_and_a_user_s_error_is_not_repeated(
    code: int, starts: int, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The first start was killed after step 5. Jobs that go on: `test_hangs`, `test_horovod_examples`."""
    (tmp_path / "metrics.jsonl").write_text('{"event": "train", "step": 5}\n')
    job = Mock(asked=False, last_words="rank 0 was ended", tail=b"", **{"run.return_value": code})
    request = replace(parse(["--max-restarts", "5", "train"]), run_dir=tmp_path)
    assert _restart(137, request, job, Starter([], {})) == code and job.run.call_count == starts
    assert said in capfd.readouterr().err.splitlines()[-1]


def test_a_program_that_a_signal_to_the_launcher_has_ended_does_not_start_again(
    capfd: pytest.CaptureFixture[str],
) -> None:
    job = Job(can_stop=False)
    job._on_signal(signal.SIGTERM, None)
    assert _restart(143, parse(["--max-restarts", "2", "python", "program.py"]), job, Starter([], {})) == 143
    assert not capfd.readouterr().err
