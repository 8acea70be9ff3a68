"""The history of a run and how it stands, from its marks (`goodput`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from hvd_cifar.errors import printable
from hvd_cifar.reporting.goodput import Mark

# Until a run whose lock cannot be seen counts as cut off: during evaluations and checkpoints it gives no sign of life.
SECONDS_OF_SILENCE = 600.0

Kind = Literal["start", "resume", "resize", "failure", "stop", "rollback", "warning", "end"]


@dataclass(frozen=True)
class Happening:
    """Something that happened at a Unix time, after a step (None: before any is known)."""

    kind: Kind
    time: float
    step: int | None
    text: str


def happenings(marks: Iterable[Mark]) -> list[Happening]:
    """What happened. More marks of the same run only add to the end of the list."""
    found: list[Happening] = []
    ranks, is_first = 0, True
    launch: Mark = {}
    before_launch: Mark = {}  # the end of the last session

    def add(kind: Kind, mark: Mark, text: str) -> None:
        found.append(Happening(kind, mark["time"], mark.get("step"), printable(text)))

    for mark in marks:
        kind, step = mark["mark"], mark.get("step")
        if kind == "launch":
            is_same_job = launch.get("began") == mark["began"]
            ends = _ends(mark, mark.get("restarts", 0) - (launch.get("restarts", 0) if is_same_job else 0))
            launch = mark
            of_session = ends.pop(0) if is_same_job and ends else ""
            if before_launch.get("mark") == "lost":
                add("failure", before_launch, f"the run is cut off after step {before_launch.get('step')}{of_session}")
            for why in ends:
                add("failure", {"time": mark["time"]}, f"a start fails{why}")
        elif kind == "start":
            now = _ranks(launch)
            if is_first and not step:
                add("start", mark, f"the run starts{_on(now)}")
            elif ranks and now and ranks != now:
                add("resize", mark, f"the run goes on after step {step}{_on(now)} instead of {ranks}")
            else:
                add("resume", mark, f"the run goes on after step {step}{_on(now)}")
            ranks, is_first = now, False
        elif kind == "rollback":
            add("rollback", mark, f"rollback to step {step}")
        elif kind == "warning":
            add("warning", mark, str(mark.get("text", "")))
        elif kind in ("end", "lost"):
            before_launch = mark
            found += [_end(mark)] if kind == "end" else []
    return found


def clock(time: float) -> str:
    """A Unix time on this machine's clock; "": a damaged file has it, and no calendar."""
    try:
        return f"{datetime.fromtimestamp(time).astimezone():%Y-%m-%d %H:%M:%S%z}"
    except (ValueError, OverflowError, OSError):
        return ""


def _end(mark: Mark) -> Happening:
    step, how = mark.get("step"), mark.get("how", "complete")
    if how == "complete":
        return Happening("end", mark["time"], step, f"the run is complete after step {step}")
    if how == "stopped":
        return Happening("stop", mark["time"], step, f"the run stops at a request, after step {step}")
    why = printable(f": {mark['why']}") if mark.get("why") else ""
    return Happening("failure", mark["time"], step, f"the run fails after step {step}{why}")


def _ranks(launch: Mark) -> int:
    found = launch.get("ranks")
    return found if isinstance(found, int) else 0


def _on(ranks: int) -> str:
    return f" on {ranks} rank{'s' * (ranks > 1)}" if ranks else ""


def _ends(launch: Mark, count: int) -> list[str]:
    """Why the last `count` starts before this launch ended, as the end of a sentence; "": not known."""
    found = launch.get("ends")
    texts = [f": {text}" for text in found] if isinstance(found, list) else []
    return ([""] * count + texts)[-count:] if count > 0 else []


@dataclass(frozen=True)
class Standing:
    """How a run stands, in a word and in a sentence."""

    word: Literal["complete", "running", "stopped", "failed", "cut off"]
    text: str


def standing(marks: Sequence[Mark], step: int, seen: float, is_alive: bool | None, now: float) -> Standing:
    """How a run stands at a Unix time.

    Args:
        step: the last one on record.
        seen, is_alive: of `run_files.last_sign` and `run_files.lives`.
        now: the Unix time.
    """
    if not marks or marks[-1]["mark"] != "end":
        if is_alive or is_alive is None and now < seen + SECONDS_OF_SILENCE:
            return Standing("running", f"the run is at step {step}" if marks else "the run sets up")
        why = "its process is gone" if is_alive is False else "it gives no sign of life"
        return Standing("cut off", f"the run is cut off after step {step}: {why}")
    words: dict[str, Literal["complete", "stopped"]] = {"complete": "complete", "stopped": "stopped"}
    return Standing(words.get(marks[-1].get("how", "complete"), "failed"), _end(marks[-1]).text)
