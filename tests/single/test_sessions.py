"""Marks of sessions: where the wall time went, and what happened. Tables of marks, each with what follows from them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.reporting import sessions
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.reporting.sessions import Mark


def launch(began: float, restarts: int = 0, **told: Any) -> Mark:
    return {"mark": "launch", "time": began + 34 * restarts, "began": began, "restarts": restarts, **told}


def mark(kind: str, time: float, step: int = 0, **told: Any) -> Mark:
    return {"mark": kind, "time": time, "step": step, **told}


PLAIN = [launch(100.0, ranks=2), mark("start", 110), mark("evaluation", 123, 5, began=120)]
PLAIN += [mark("checkpoints", 125, 5, began=123)]
KILLED = [*PLAIN, mark("lost", 140, 5)]
FAILED = [*PLAIN, mark("end", 132, 7, how="failed", why="no room")]
SAID = "rank 1 on a was ended by signal 9 (Killed)"
START, CUT_OFF = "the run starts on 2 ranks", "the run is cut off after step 5"
DONE = "the run is complete after step 9"

# Marks, seconds by kind, and what happened.
CASES: dict[str, tuple[list[Mark], dict[str, float], list[str]]] = {
    "one session, which warns": (
        [*PLAIN, mark("warning", 130, 6, text="rank 1 is slow"), mark("checkpoints", 150, 9, began=148)]
        + [mark("end", 151, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 4, "useful_steps": 34},
        [START, "rank 1 is slow", DONE],
    ),
    "a killed rank, started again from the checkpoint of step 5": (
        [*KILLED, launch(100.0, 1, ranks=2, ends=[SAID]), mark("start", 157, 5), mark("end", 177, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 30, "repeated_steps": 15, "restart": 17},
        [START, f"{CUT_OFF}: {SAID}", "the run goes on after step 5 on 2 ranks", DONE],
    ),
    "stopped after a checkpoint, and resumed by hand an hour later": (
        [*PLAIN, mark("checkpoints", 131, 7, began=130), mark("end", 132, 7, how="stopped"), launch(3732.0, ranks=4)]
        + [mark("start", 3740, 7), mark("end", 3750, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 3, "useful_steps": 26, "restart": 8},
        [
            START,
            "the run stops at a request, after step 7",
            "the run goes on after step 7 on 4 ranks instead of 2",
            DONE,
        ],
    ),
    "ended by an error after the checkpoint, which the session told": (
        [*FAILED, launch(100.0, 1, ranks=2, ends=["no room"]), mark("start", 140, 5), mark("end", 150, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 20, "repeated_steps": 7, "restart": 8},
        [START, "the run fails after step 7: no room", "the run goes on after step 5 on 2 ranks", DONE],
    ),
    "killed before any checkpoint; another start fails": (
        [launch(0.0), mark("start", 10), mark("lost", 30), launch(0.0, 2, ends=["exit code 1"]), mark("start", 40)]
        + [mark("end", 60, 9)],
        {"set_up": 10, "repeated_steps": 20, "restart": 10, "useful_steps": 20},
        ["the run starts", "the run is cut off after step 0", "a start fails: exit code 1"]
        + ["the run goes on after step 0", DONE],
    ),
    "the second session's checkpoint is damaged, the third goes on from the first's": (
        [launch(0.0), mark("start", 1), mark("checkpoints", 10, 5, began=9), mark("end", 10, 5, how="stopped")]
        + [launch(20.0), mark("start", 21, 5), mark("checkpoints", 30, 9, began=29), mark("lost", 35, 9)]
        + [launch(40.0), mark("start", 42, 5), mark("end", 52, 9)],
        {"set_up": 1, "checkpoints": 2, "useful_steps": 18, "restart": 3, "repeated_steps": 13},
        ["the run starts", "the run stops at a request, after step 5", "the run goes on after step 5"]
        + ["the run is cut off after step 9", "the run goes on after step 5", DONE],
    ),
    "a killed elastic job, which goes on from memory after the last step that it logged": (
        [*PLAIN, mark("lost", 140, 7), launch(100.0, 1, ranks=1), mark("start", 157, 8), mark("end", 177, 9)],
        {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 45, "restart": 17},
        [START, "the run is cut off after step 7", "the run goes on after step 8 on 1 rank instead of 2", DONE],
    ),
    "a checkpoint within an evaluation": (
        [launch(0.0), mark("start", 10), mark("checkpoints", 18, 5, began=16), mark("evaluation", 20, 5, began=15)],
        {"set_up": 10, "useful_steps": 6, "checkpoints": 2, "evaluation": 2},
        ["the run starts"],
    ),
    "cut off": (KILLED, {"set_up": 10, "evaluation": 3, "checkpoints": 2, "useful_steps": 25}, [START, CUT_OFF]),
}


@pytest.mark.parametrize("name", CASES)
def test_where_the_time_went_and_what_happened(name: str) -> None:
    marks, seconds, happened = CASES[name]
    found = sessions.shares(marks)
    assert found["seconds"] == sum(seconds.values())
    shares = {kind: found[kind] * found["seconds"] for kind in sessions.KINDS}
    assert shares == pytest.approx({**dict.fromkeys(sessions.KINDS, 0.0), **seconds}, abs=0.01)
    assert [one.text for one in sessions.happenings(marks)] == happened


def test_a_line_for_people_has_the_largest_first() -> None:
    marks = CASES["one session, which warns"][0]
    line = "wall time 51.0 s: useful steps 66.7%, set up 19.6%, checkpoints 7.8%, evaluation 5.9%"
    assert sessions.in_words(sessions.shares(marks)) == line


@pytest.mark.parametrize(
    ("marks", "word"),
    [([], "running"), (PLAIN, "running"), (KILLED, "cut off"), (FAILED, "failed")]
    + [([*FAILED, launch(0.0, 1)], "running"), ([*PLAIN, mark("end", 150, 9)], "complete")]
    + [([*PLAIN, mark("end", 150, 9, how="stopped")], "stopped")],
)
def test_how_a_run_stands(marks: list[Mark], word: str) -> None:
    assert sessions.standing(marks, 7)[0] == word


@pytest.mark.parametrize(
    "wrong",
    ['{"mark": "end"}', '{"mark": 5, "time": 1}', "[]", '{"mark": "launch", "time": 1, "began": "x"}',
     '{"mark": "evaluation", "time": 1}', '{"mark": "end", "time": 1' + "0" * 400 + "}", "[" * 3000],
)  # fmt: skip
def test_marks_that_are_none_are_left_out(wrong: str) -> None:
    assert sessions.read("".join(json.dumps(m) + "\n" for m in KILLED) + wrong) == KILLED


def _reporter(folder: Path) -> Reporter:
    reporter = Reporter(folder, "cifar10", 40)
    reporter.open(0)
    return reporter


def test_a_killed_session_ends_at_its_last_sign_of_life(tmp_path: Path) -> None:
    killed = _reporter(tmp_path)
    killed.begin_session(began=50.0)
    killed.mark("start", step=0)
    path = tmp_path / "sessions.jsonl"
    for lives in (True, False):  # at most once a second
        os.utime(path, (0, 0))
        killed.beat()
        assert (path.stat().st_mtime > 0) is lives
    with path.open("a") as file:
        file.write('{"mark": "che')
    os.utime(path, (0, 4e9))
    after = _reporter(tmp_path)
    after.begin_session(began=50.0, restarts=1)
    after.mark("end", step=3)
    _reporter(tmp_path).begin_session(began=70.0)
    found: list[Any] = sessions.read(path.read_text())
    assert [m["mark"] for m in found] == ["launch", "start", "lost", "launch", "end", "launch"]
    assert found[2]["time"] == 4e9 and found[3]["restarts"] == 1
