"""metrics.jsonl and summary.json: whole lines, and one curve after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.reporting.metrics import Reporter


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def _report(run_dir: Path, first: int, steps: list[int]) -> None:
    reporter = Reporter(run_dir, watched=False, dataset="cifar10")
    reporter.open(first)
    for step in steps:
        reporter.train(step, step / 10, 1.0 / step, 0.1, 100.0, 0.5)
    reporter.close()


def test_events_are_an_object_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, watched=False, dataset="cifar10")
    reporter.open(0)
    reporter.train(10, 0.5, 2.25, 0.1, 1234.5, 0.25)
    reporter.evaluation(10, 0.5, 0.61, 1.5, 10_000)
    reporter.close()
    train, evaluation = _events(tmp_path)
    assert train == {
        "event": "train",
        "dataset": "cifar10",
        "step": 10,
        "epoch": 0.5,
        "loss": 2.25,
        "learning_rate": 0.1,
        "images_per_second": 1234.5,
    }
    assert evaluation == {
        "event": "eval",
        "dataset": "cifar10",
        "step": 10,
        "epoch": 0.5,
        "test_accuracy": 0.61,
        "test_loss": 1.5,
        "test_examples": 10_000,
    }
    lines = capfd.readouterr().out.splitlines()
    assert "step 10, loss = 2.2500 (1234.5 images/s; 0.250 s/batch)" in lines[0]
    assert "cifar10 test accuracy 61.00%" in lines[1]


def test_a_resumed_run_keeps_one_curve(tmp_path: Path) -> None:
    _report(tmp_path, 0, [10, 20, 30])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"event": "train", "st')  # killed in the middle of a line
    _report(tmp_path, 20, [30, 40])
    assert [e["step"] for e in _events(tmp_path)] == [10, 20, 30, 40]


def test_only_rank_0_writes_and_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(None, watched=True, dataset="cifar10")
    reporter.open(0)
    with reporter.progress(0, 10):
        reporter.train(1, 0.1, 1.0, 0.1, 1.0, 1.0)
        reporter.evaluation(1, 0.1, 0.5, 1.0, 10)
        reporter.say("hello")
    reporter.summary({"a": 1})
    reporter.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_watched_run_draws_a_bar_above_which_lines_stay(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, watched=True, dataset="cifar10")
    reporter.open(0)
    with reporter.progress(0, 40):
        reporter.train(10, 0.5, 2.25, 0.1, 1234.5, 0.25)
    reporter.close()
    out = capfd.readouterr().out
    assert "10/40" in out and "\x1b[" in out
    assert "step 10, loss = 2.2500" in out


def test_a_folder_that_cannot_be_written_is_a_user_s_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="cannot write"):
        Reporter(tmp_path, watched=False, dataset="cifar10").open(0)
    (tmp_path / "summary.json.part").mkdir()
    with pytest.raises(UserError, match=r"cannot write .*summary.json"):
        Reporter(tmp_path, watched=False, dataset="cifar10").summary({})
