"""What happened in a run and where its wall time went, from marks in sessions.jsonl.

A session is the life of rank 0's process. A run has several where it is started again, by the launcher or by hand.
Marks are objects with "mark" and "time" (Unix time, seconds):

launch: the session's ranks are being started. "began", "restarts", "ends": of `environment.Launch`; "ranks"; "elastic".
start: the first step follows. "step": finished ones.
evaluation, checkpoints: work other than steps ends; it began at "began". "step": finished ones.
warning: "text", as the user saw it, after "step".
end: the session ends after "step". "how": complete, stopped (at a request), or failed, and then "why".
lost: the last sign of life of the session before, which was killed after it logged "step". The next one writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from hvd_cifar.errors import printable
from hvd_cifar.fields import MOST_STEPS

SESSIONS = "sessions.jsonl"
STEPS, REPEATED = "useful_steps", "repeated_steps"
KINDS = (
    STEPS,
    REPEATED,  # steps, also incomplete ones, that a restart lost
    "evaluation",
    "checkpoints",
    "set_up",  # from the launcher's start to the first step
    "restart",  # from rank 0's last sign of life, or a new launcher's start, to the first step
)
SPANS = ("evaluation", "checkpoints")

Mark = dict[str, Any]


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


def shares(marks: Iterable[Mark]) -> dict[str, float]:
    """The wall time in seconds, from the launcher's start to the last mark, and the share of it of each of `KINDS`."""
    seconds = dict.fromkeys(KINDS, 0.0)
    for kind, begin, end in intervals(marks):
        seconds[kind] += end - begin
    total = sum(seconds.values())
    return {"seconds": round(total, 3), **{kind: round(part / (total or 1), 5) for kind, part in seconds.items()}}


def in_words(found: dict[str, float]) -> str:
    """What `shares` found, in a line, the largest first."""
    parts = sorted(((found[kind], kind) for kind in KINDS if found[kind]), reverse=True)
    return f"wall time {found['seconds']:.1f} s: " + ", ".join(f"{k.replace('_', ' ')} {p:.1%}" for p, k in parts)


@dataclass
class _Part:
    """Time of one kind. first, last: finished steps when it begins and ends; is_lost: it ends with a kill."""

    kind: str
    begin: float
    end: float
    first: int
    last: int
    is_lost: bool = False

    def is_kept(self, step: int) -> bool:
        """Whether the run, which goes on after `step`, has not lost the steps of this time.

        A killed session may have logged its last step before the time ended: an elastic job goes on from memory.
        """
        return self.last <= step and not (self.is_lost and self.first >= step)


def intervals(marks: Iterable[Mark]) -> list[tuple[str, float, float]]:
    """What the time went into: kind, begin and end in Unix time. The time between two launchers is in none.

    Clocks of several hosts may differ a little: an interval of negative length is left out.
    """
    parts: list[_Part] = []
    job: float | None = None  # when the launcher began
    kind, at, first = "set_up", -math.inf, 0  # what goes on, since when, and after which step
    for mark in marks:
        name, time, step = mark["mark"], mark["time"], int(mark.get("step", 0))
        if name == "launch" and mark["began"] != job:  # else the time counts from the last sign of life
            job = at = mark["began"]
        if name in ("launch", "warning") or job is None:
            continue
        end = max(at, mark["began"]) if name in SPANS else time
        parts.append(_Part(kind, at, end, first, step, name == "lost"))
        if name in SPANS:
            parts.append(_Part(name, end, time, step, step))
        elif name == "start":
            for part in parts:
                if part.kind == STEPS and not part.is_kept(step):
                    part.kind = REPEATED
            kind = STEPS
        elif name in ("end", "lost"):
            kind = "restart"
        at, first = time, step
    return [(part.kind, part.begin, part.end) for part in parts if part.begin < part.end]


@dataclass(frozen=True)
class Happening:
    """Something that happened at a Unix time."""

    kind: Literal["start", "resume", "resize", "failure", "stop", "warning", "end"]
    time: float
    text: str


def happenings(marks: Iterable[Mark]) -> list[Happening]:
    """What happened."""
    found: list[Happening] = []
    launch: Mark = {}
    lost: Mark | None = None  # the end of a session that was killed; the next launch may know why
    ranks: int | None = None  # of the last session that began with steps

    for mark in marks:
        kind, time, step = mark["mark"], mark["time"], mark.get("step")
        if kind == "launch":
            is_same_job = launch.get("began") == mark["began"]
            ends = _ends(mark, mark.get("restarts", 0) - (launch.get("restarts", 0) if is_same_job else 0))
            of_session = ends.pop(0) if is_same_job and ends else ""
            found += [_cut_off(lost, of_session)] if lost else []
            found += [Happening("failure", time, f"a start fails{why}") for why in ends]
            launch, lost = mark, None
        elif kind == "start":
            now = launch["ranks"] if isinstance(launch.get("ranks"), int) else 0
            on = f" on {now} rank{'s' * (now > 1)}" if now else ""
            if ranks is None and not step:
                found.append(Happening("start", time, f"the run starts{on}"))
            elif ranks and now and ranks != now:
                found.append(Happening("resize", time, f"the run goes on after step {step}{on} instead of {ranks}"))
            else:
                found.append(Happening("resume", time, f"the run goes on after step {step}{on}"))
            ranks = now
        elif kind == "warning":
            found.append(Happening("warning", time, printable(str(mark.get("text", "")))))
        elif kind == "end":
            found.append(_end(mark))
        elif kind == "lost":
            lost = mark
    return found + ([_cut_off(lost)] if lost else [])


def standing(marks: Sequence[Mark], step: int) -> tuple[str, str]:
    """How a run stands, in a word (complete, stopped, failed, cut off, running) and in a sentence.

    `step`: the last one on record.
    """
    last = marks[-1] if marks else {"mark": ""}
    if last["mark"] == "end":
        end = _end(last)
        return {"end": "complete", "stop": "stopped"}.get(end.kind, "failed"), end.text
    if last["mark"] == "lost":
        return "cut off", f"{_cut_off(last).text}: it gives no sign of life"
    return "running", f"the run is at step {step}"


def _end(mark: Mark) -> Happening:
    step, how = mark.get("step"), mark.get("how", "complete")
    if how == "complete":
        return Happening("end", mark["time"], f"the run is complete after step {step}")
    if how == "stopped":
        return Happening("stop", mark["time"], f"the run stops at a request, after step {step}")
    why = printable(f": {mark['why']}") if mark.get("why") else ""
    return Happening("failure", mark["time"], f"the run fails after step {step}{why}")


def _cut_off(lost: Mark, why: str = "") -> Happening:
    return Happening("failure", lost["time"], f"the run is cut off after step {lost.get('step')}{why}")


def _ends(launch: Mark, count: int) -> list[str]:
    """Why the last `count` starts before this launch ended, as the end of a sentence; "": not known."""
    found = launch.get("ends")
    texts = [printable(f": {text}") for text in found] if isinstance(found, list) else []
    return ([""] * count + texts)[-count:] if count > 0 else []


def clock(time: float) -> str:
    """A Unix time on this machine's clock; "": a damaged file has it, and no calendar."""
    try:
        return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S%z}"
    except (ValueError, OverflowError, OSError):
        return ""
