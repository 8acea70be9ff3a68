"""Where the wall time went: tables of marks, each with its seconds by kind."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.reporting import goodput
from hvd_cifar.reporting.metrics import Reporter


def launch(began: float, restarts: int = 0, time: float = 0) -> goodput.Mark:
    return {"mark": "launch", "time": time or began + 1, "began": began, "restarts": restarts}


def mark(kind: str, time: float, step: int = 0) -> goodput.Mark:
    return {"mark": kind, "time": time, "step": step}


def span(kind: str, began: float, time: float, step: int) -> goodput.Mark:
    return {"mark": kind, "time": time, "began": began, "step": step}


PLAIN = [launch(100.0), mark("start", 110, 0), span("evaluation", 120, 123, 5), span("checkpoints", 123, 125, 5)]
KILLED = [*PLAIN, {"mark": "lost", "time": 140.0, "step": 5}]

CASES: dict[str, tuple[list[goodput.Mark], dict[str, Any]]] = {
    "one session": (
        [*PLAIN, span("checkpoints", 148, 150, 9), mark("end", 151, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 4, "useful_steps": 34},
    ),
    "a killed rank, started again from the checkpoint of step 5": (
        [*KILLED, launch(100.0, 1, 146), mark("start", 157, 5), mark("end", 177, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 30, "repeated_steps": 15, "restart": 17},
    ),
    "stopped after a checkpoint, and resumed by hand an hour later": (
        [*PLAIN, span("checkpoints", 130, 131, 7), mark("end", 132, 7), launch(3732.0), mark("start", 3740, 7)]
        + [mark("end", 3750, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 3, "useful_steps": 26, "restart": 8},
    ),
    "ended by an error after the checkpoint": (
        [*PLAIN, mark("end", 132, 7), launch(200.0), mark("start", 208, 5), mark("end", 218, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 20, "repeated_steps": 7, "restart": 8},
    ),
    "killed before any checkpoint": (
        [launch(0.0), mark("start", 10), mark("lost", 30), launch(0.0, 1, 34), mark("start", 40)]
        + [mark("end", 60, 9)],
        {"set_up": 10, "repeated_steps": 20, "restart": 10, "useful_steps": 20},
    ),
    "a rollback that took 2 s; the checkpoint of step 5 is passed over for the start": (
        [*PLAIN, span("restart", 135, 137, 6), mark("rollback", 137, 0), mark("end", 157, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "repeated_steps": 20, "restart": 2, "useful_steps": 20},
    ),
    "the second session's checkpoint is damaged, the third goes on from the first's": (
        [launch(0.0), mark("start", 1), span("checkpoints", 9, 10, 5), mark("end", 10, 5)]
        + [launch(20.0), mark("start", 21, 5), span("checkpoints", 29, 30, 9), mark("lost", 35)]
        + [launch(40.0), mark("start", 42, 5), mark("end", 52, 9)],
        {"set_up": 1, "checkpoints": 2, "useful_steps": 18, "restart": 3, "repeated_steps": 13},
    ),
    "a killed elastic job, which goes on from memory after the last step that it logged": (
        [*PLAIN, {"mark": "lost", "time": 140.0, "step": 7}, launch(100.0, 1, 146), mark("start", 157, 8)]
        + [mark("end", 177, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 45, "restart": 17},
    ),
    "the launcher's clock is ahead of rank 0's": (
        [launch(5.0), mark("start", 4), mark("end", 14, 3)],
        {"useful_steps": 10},
    ),
    "nothing": ([], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_seconds_by_kind(name: str) -> None:
    marks, expected = CASES[name]
    assert goodput.seconds_by_kind(marks) == {**dict.fromkeys(goodput.KINDS, 0.0), **expected}
    found = goodput.shares(marks)
    assert found["seconds"] == sum(expected.values())
    assert sum(found[kind] for kind in goodput.KINDS) == pytest.approx(1 if marks else 0, abs=0.001)


def test_a_line_for_people_has_the_largest_first() -> None:
    marks, _ = CASES["one session"]
    line = "wall time 51.0 s: useful steps 66.7%, set up 19.6%, checkpoints 7.8%, evaluation 5.9%"
    assert goodput.in_words(goodput.shares(marks)) == line


@pytest.mark.parametrize(
    "wrong",
    ['{"mark": "end"}', '{"mark": 5, "time": 1}', "[]", '{"mark": "launch", "time": 1, "began": "x"}',
     '{"mark": "evaluation", "time": 1}', '{"mark": "end", "time": 1' + "0" * 400 + "}", "[" * 3000],
)  # fmt: skip
def test_marks_that_are_none_are_left_out(wrong: str) -> None:
    assert goodput.seconds_by_kind(goodput.read(wrong)) == dict.fromkeys(goodput.KINDS, 0.0)
    whole = "".join(json.dumps(m) + "\n" for m in KILLED)
    assert goodput.read(whole + wrong) == KILLED


def _reporter(folder: Path) -> Reporter:
    reporter = Reporter(folder, watched=False, dataset="cifar10")
    reporter.open(0)
    return reporter


def test_a_killed_session_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    killed = _reporter(tmp_path)
    killed.begin_session(began=50.0)
    killed.mark("start", step=0)
    path = tmp_path / "sessions.jsonl"
    with path.open("a") as file:
        file.write('{"mark": "che')
    os.utime(path, (0, 4e9))
    after = _reporter(tmp_path)
    after.begin_session(began=50.0, restarts=1)
    after.mark("end", step=3)
    _reporter(tmp_path).begin_session(began=70.0)
    found: list[Any] = goodput.read(path.read_text())
    assert [m["mark"] for m in found] == ["launch", "start", "lost", "launch", "end", "launch"]
    assert found[2]["time"] == 4e9 and found[3]["restarts"] == 1


def test_a_sign_of_life_is_given_at_most_once_a_second(tmp_path: Path) -> None:
    reporter = _reporter(tmp_path)
    reporter.begin_session(began=50.0)
    path = tmp_path / "sessions.jsonl"
    for lives in (True, False):
        os.utime(path, (0, 0))
        reporter.beat()
        assert (path.stat().st_mtime > 0) is lives
