"""metrics.jsonl, TensorBoard and summary.json: whole lines, and one curve after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.runs import events
from hvd_cifar.errors import UserError
from hvd_cifar.reporting.metrics import Reporter
from tests.run_dirs import full_disk

TRAIN = (10, 0.5, 2.25, 0.1, 1234.5, 0.25)  # arguments of `Reporter.train`
TESTED = {"accuracy": 0.61, "loss": 1.5, "examples": 10_000}


def _report(run_dir: Path, first: int, steps: list[int]) -> None:
    reporter = Reporter(run_dir, "cifar10", 40)
    reporter.open(first)
    for step in steps:
        reporter.train(step, step / 10, 1.0 / step, 0.1, 100.0, 0.5)


def test_events_are_an_object_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, "cifar10", 40)
    reporter.open(0)
    reporter.train(*TRAIN)
    reporter.evaluation(10, 0.5, TESTED)
    train, evaluation = events(tmp_path)
    common = {"dataset": "cifar10", "step": 10, "epoch": 0.5}
    rates = {"learning_rate": 0.1, "images_per_second": 1234.5}
    assert train == {**common, **rates, "event": "train", "loss": 2.25}
    tested = {"test_accuracy": 0.61, "test_loss": 1.5, "test_examples": 10_000}
    assert evaluation == {**common, **tested, "event": "eval"}
    lines = capfd.readouterr().out.splitlines()
    assert "step 10, loss = 2.2500 (1234.5 images/s; 0.250 s/batch; epoch 0.50, 0:00:08 left)" in lines[0]
    assert "cifar10 test accuracy 61.00%" in lines[1]


@pytest.mark.parametrize("damage", [b"\xff", b"5", b'{"event": "train"}', b'{"step": "x"}', b""])
def test_a_damaged_line_costs_no_other_line(damage: bytes, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _report(tmp_path, 0, [10, 20, 30])
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], damage, *lines[2:], b""]))
    _report(tmp_path, 30, [40])
    assert [e["step"] for e in events(tmp_path)] == [10, 30, 40]
    assert f"hvd_cifar: warning: {path}: 1 damaged line removed\n" in capfd.readouterr().err


def test_what_a_full_disk_refuses_is_written_when_there_is_room(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Lines and TensorBoard's events fail, then wait."""
    reporter = Reporter(tmp_path, "cifar10", 40)
    reporter.open(0)
    reporter.train(1, 0.1, 1.0, 0.1, 100.0, 0.5)
    with full_disk():
        reporter.train(2, 0.2, 1.0, 0.1, 100.0, 0.5)
        with pytest.raises(UserError, match="cannot write .*: File too large"):
            reporter.summary({})
        reporter.evaluation(2, 0.2, TESTED)
    assert reporter.is_behind and "note" not in capfd.readouterr().err
    assert not (tmp_path / "summary.json").exists()
    reporter.catch_up()
    assert not reporter.is_behind and "nothing of it is lost" in capfd.readouterr().err
    reporter.train(3, 0.3, 1.0, 0.1, 100.0, 0.5)
    found_events = [(e["event"], e["step"]) for e in events(tmp_path)]
    assert found_events == [("train", 1), ("train", 2), ("eval", 2), ("train", 3)]
    found = _by_events(tmp_path / "tensorboard")
    assert (found["images_per_second"], found["cifar10/test_loss"]) == ([1, 2, 3], [2])


def _by_events(folder: Path) -> dict[str, list[int]]:
    """Steps by tag, as TensorBoard's reader of event files has them."""
    accumulator = EventAccumulator(str(folder)).Reload()
    return {tag: [event.step for event in accumulator.Tensors(tag)] for tag in accumulator.Tags()["tensors"]}


def test_each_step_is_there_once_after_a_kill_and_a_resume(tmp_path: Path) -> None:
    killed = Reporter(tmp_path, "cifar10", 40)
    killed.open(0)
    for step in (10, 20, 30):
        killed.train(step, step / 10, 1.0, 0.1, 100.0, 0.5)
    killed.evaluation(30, 3.0, TESTED)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"event": "train", "st')
    # Never closed: what was written is on disk, and the last record is cut off.
    (file,) = (tmp_path / "tensorboard").iterdir()
    file.write_bytes(file.read_bytes() + file.read_bytes()[:9])
    assert _by_events(tmp_path / "tensorboard")["images_per_second"] == [10, 20, 30]
    _report(tmp_path, 20, [25, 30, 40])
    found = _by_events(tmp_path / "tensorboard")
    assert found["images_per_second"] == found["learning_rate"] == [10, 20, 25, 30, 40]
    assert "cifar10/test_loss" not in found  # of step 30, which has no evaluation now
    assert [e["step"] for e in events(tmp_path)] == [10, 20, 25, 30, 40]
    _report(tmp_path, 25, [30])
    assert _by_events(tmp_path / "tensorboard")["images_per_second"] == [10, 20, 25, 30]


def test_only_rank_0_writes_and_speaks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(None, "cifar10", 40)
    reporter.open(0)
    reporter.train(*TRAIN)
    reporter.evaluation(10, 0.5, TESTED)
    reporter.say("hello")
    reporter.summary({"a": 1})
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_quiet_run_prints_warnings_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path, "cifar10", 40, quiet=True)
    reporter.open(0)
    reporter.begin_session(began=50.0, ranks=2, ends=["killed"])
    reporter.train(*TRAIN)
    reporter.evaluation(10, 0.5, TESTED)
    reporter.warn("rank 1 is slow", step=10)
    reporter.say("done")
    assert capfd.readouterr() == ("", "hvd_cifar: rank 1 is slow\n")
    assert len(events(tmp_path)) == 2
    launch, warning = map(json.loads, (tmp_path / "sessions.jsonl").read_text().splitlines())
    assert (launch["ranks"], launch["ends"]) == (2, ["killed"])
    assert (warning["mark"], warning["step"], warning["text"]) == ("warning", 10, "rank 1 is slow")
