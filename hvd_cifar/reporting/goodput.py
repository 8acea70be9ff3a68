"""Where a run's wall time went: marks in sessions.jsonl, and from them seconds by kind.

A session is the life of rank 0's process. A run has several where it is started again, by the launcher or by hand.
Marks are objects with "mark" and "time" (Unix time, seconds):

launch: the session's ranks are being started. "began", "restarts", "ends": of `environment.Launch`; "ranks"; "elastic".
start: the first step follows. "step": finished ones.
evaluation, checkpoints, restart: work other than steps ends; it began at "began". "step": finished ones.
rollback: the run goes on from the checkpoint of an earlier "step".
warning: "text", as the user saw it, after "step".
end: the session ends after "step". "how": complete, stopped (at a request), or failed, and then "why".
lost: the last sign of life of the session before, which was killed after it logged "step". The next one writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvd_cifar.fields import MOST_STEPS

SESSIONS = "sessions.jsonl"
KINDS = (
    "useful_steps",
    "repeated_steps",  # steps, also incomplete ones, that a restart or a rollback lost
    "evaluation",
    "checkpoints",
    "set_up",  # from the launcher's start to the first step
    "restart",  # from rank 0's last sign of life, or a new launcher's start, to the first step; and in a rollback
)
SPANS = ("evaluation", "checkpoints", "restart")

Mark = dict[str, Any]
Interval = tuple[str, float, float]


@dataclass
class _Steps:
    """Steps made one after the other, between two times.

    step: the first one follows it.
    reached: later steps, and when each was done.
    logged: the last step on record of a session that was killed.
    """

    step: int
    begin: float
    end: float
    reached: list[tuple[int, float]] = field(default_factory=list)
    logged: int | None = None


def read(text: str) -> list[Mark]:
    """The marks of sessions.jsonl; what is damaged is left out."""
    marks = []
    for line in text.splitlines():
        try:
            mark = json.loads(line)
            began = mark["began"] if mark["mark"] in (*SPANS, "launch") else 0
            numbers = [mark["time"], mark.get("step", 0), began, mark.get("restarts", 0)]
            if isinstance(mark["mark"], str) and all(abs(number) <= MOST_STEPS for number in numbers):
                marks.append(mark)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError):
            continue
    return marks


def has_ended(marks: Sequence[Mark]) -> bool:
    """Whether the last session among the marks has ended, by its own mark or that of the next one."""
    return not marks or marks[-1]["mark"] in ("end", "lost")


def shares(marks: Sequence[Mark]) -> dict[str, float]:
    """The wall time in seconds, and each kind's share of it."""
    seconds = seconds_by_kind(marks)
    total = sum(seconds.values())
    return {"seconds": round(total, 3), **{kind: round(part / (total or 1), 5) for kind, part in seconds.items()}}


def in_words(found: dict[str, float]) -> str:
    """What `shares` found, in a line, the largest first."""
    parts = sorted(((found[kind], kind) for kind in KINDS if found[kind]), reverse=True)
    return f"wall time {found['seconds']:.1f} s: " + ", ".join(f"{k.replace('_', ' ')} {p:.1%}" for p, k in parts)


def seconds_by_kind(marks: Iterable[Mark]) -> dict[str, float]:
    """Seconds of each of `KINDS`, from the launcher's start to the last mark; see `intervals`."""
    totals = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in intervals(marks):
        totals[kind] += end - begin
    return totals


def intervals(marks: Iterable[Mark]) -> list[Interval]:
    """What the time went into: kind, begin and end in Unix time. The time between two launchers is in none.

    Clocks of several hosts may differ a little: an interval of negative length is left out.
    """
    spans: list[Interval] = []
    others: list[Interval] = []
    runs: list[_Steps] = []
    job: float | None = None  # when the launcher began
    steps: _Steps | None = None  # None: ranks are being started, which is of kind `starting`, since `at`
    starting, at = "set_up", -math.inf  # before the first launch
    for mark in marks:
        kind, time, step = mark["mark"], mark["time"], int(mark.get("step", 0))
        if kind == "launch":
            if mark["began"] != job:  # else `at` is the last sign of life
                job = at = mark["began"]
            steps = None
        elif at == -math.inf:
            continue
        else:
            if kind in SPANS:
                spans.append((kind, mark["began"], time))
            if steps:
                steps.end = time
                steps.reached += [(step, time)] * (kind in SPANS or kind == "end")
                steps.logged = step if kind == "lost" else None
            elif kind != "warning":
                others.append((starting, at, mark["began"] if kind in SPANS else time))
            if kind in ("start", "rollback"):
                steps = _Steps(step, time, time)
                runs.append(steps)
            elif kind in ("end", "lost"):
                steps = None
            if kind not in (*SPANS, "warning"):
                starting = "restart"
            at = time if kind != "warning" else at
    others += _of_steps(runs)
    uncovered = [(kind, *part) for kind, begin, end in others for part in _outside(begin, end, spans)]
    return sorted([*(span for span in spans if span[1] < span[2]), *uncovered], key=lambda found: found[1])


def _of_steps(runs: Sequence[_Steps]) -> Iterator[Interval]:
    """The time of steps. Steps after the one that a later session or rollback begins from are repeated."""
    kept = math.inf
    for run in reversed(runs):
        own = [time for step, time in run.reached if step == kept]  # such as of its checkpoint
        before = [time for step, time in run.reached if step < kept]
        if run.logged is not None and run.logged <= kept:  # an elastic job goes on from memory
            before = [run.end]
        lost_from = run.end if kept == math.inf else max(own or before or [run.begin])
        if kept <= run.step:
            lost_from = run.begin
        yield "useful_steps", run.begin, lost_from
        yield "repeated_steps", lost_from, run.end
        kept = min(kept, run.step)


def _outside(begin: float, end: float, spans: Iterable[Interval]) -> Iterator[tuple[float, float]]:
    """The parts of an interval that lie in none of the spans."""
    for _, first, last in sorted(spans, key=lambda span: span[1]):
        if begin < first < end:
            yield begin, first
        if first < end:
            begin = max(begin, last)
    if begin < end:
        yield begin, end
