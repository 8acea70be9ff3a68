"""What happened to a run, and how it stands: tables of marks."""

from __future__ import annotations

from typing import Any

import pytest

from hvd_cifar.reporting import story
from hvd_cifar.reporting.goodput import Mark


def launch(began: float, restarts: int = 0, **told: Any) -> Mark:
    return {"mark": "launch", "time": began + 34 * restarts, "began": began, "restarts": restarts, **told}


def mark(kind: str, time: float, step: int = 0, **told: Any) -> Mark:
    return {"mark": kind, "time": time, "step": step, **told}


FIRST = [launch(0.0, ranks=2), mark("start", 10), mark("checkpoints", 20, 5, began=19.0)]
KILLED = [*FIRST, mark("lost", 30, 7)]
ENDED = [*FIRST, mark("end", 30, 7, how="failed", why="no room")]
SAID = "rank 1 on a was ended by signal 9 (Killed)"

CASES: dict[str, tuple[list[Mark], list[tuple[str, int, str]]]] = {
    "one session, which warns": (
        [*FIRST, mark("warning", 25, 6, text="rank 1 is slow"), mark("end", 30, 9, how="complete")],
        [("start", 10, "the run starts on 2 ranks"), ("warning", 25, "rank 1 is slow")]
        + [("end", 30, "the run is complete after step 9")],
    ),
    "a lost rank, and the launcher's second start": (
        [*KILLED, launch(0.0, 1, ranks=2, ends=[SAID]), mark("start", 40, 5)],
        [("start", 10, "the run starts on 2 ranks"), ("failure", 30, f"the run is cut off after step 7: {SAID}")]
        + [("resume", 40, "the run goes on after step 5 on 2 ranks")],
    ),
    "an error that the session told itself is told once": (
        [*ENDED, launch(0.0, 1, ranks=2, ends=["no room"]), mark("start", 40, 5)],
        [("start", 10, "the run starts on 2 ranks"), ("failure", 30, "the run fails after step 7: no room")]
        + [("resume", 40, "the run goes on after step 5 on 2 ranks")],
    ),
    "killed, and resumed by hand; the launcher's first start of these failed": (
        [*KILLED, launch(100.0, 1, ends=["exit code 1"]), mark("start", 120, 5)],
        [("start", 10, "the run starts on 2 ranks"), ("failure", 30, "the run is cut off after step 7")]
        + [("failure", 134, "a start fails: exit code 1"), ("resume", 120, "the run goes on after step 5")],
    ),
    "a request to stop, and a rollback": (
        [*FIRST, mark("rollback", 22, 5), mark("end", 30, 8, how="stopped")],
        [("start", 10, "the run starts on 2 ranks"), ("rollback", 22, "rollback to step 5")]
        + [("stop", 30, "the run stops at a request, after step 8")],
    ),
    "nothing": ([], []),
}


@pytest.mark.parametrize("name", CASES)
def test_what_happened(name: str) -> None:
    marks, expected = CASES[name]
    found = story.happenings(marks)
    assert [(one.kind, one.time, one.text) for one in found] == expected


COMPLETE = [*FIRST, mark("end", 30, 9, how="complete")]
STOPPED = [*FIRST, mark("end", 30, 8, how="stopped")]


@pytest.mark.parametrize(
    ("marks", "is_alive", "after", "word"),
    [
        ([], None, 0, "running"),
        (FIRST, True, 9999, "running"),
        (FIRST, None, 599, "running"),
        (FIRST, None, 601, "cut off"),
        (FIRST, False, 1, "cut off"),
        (COMPLETE, False, 0, "complete"),
        (STOPPED, False, 0, "stopped"),
        (ENDED, False, 0, "failed"),
        ([*ENDED, launch(0.0, 1)], True, 500, "running"),
    ],
)
def test_how_a_run_stands(marks: list[Mark], is_alive: bool | None, after: float, word: str) -> None:
    assert story.standing(marks, 7, 30.0, is_alive, 30 + after).word == word
