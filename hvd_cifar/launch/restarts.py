"""Whether a failed job starts again (`--max-restarts`), and after how long."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvd_cifar.errors import DIVERGED, RESUME

MAX_SECONDS = 60.0
END_BYTES = 65_536  # of metrics.jsonl: some hundred lines
# Exit codes after which a job never restarts: success, a user's error, stopped as asked, and a second Ctrl-C.
FINAL = (0, 2, RESUME, 128 + signal.SIGINT)


@dataclass(frozen=True)
class Failure:
    """How a job ended.

    Attributes:
        code: exit code.
        said: of `last_said`.
        step: the last one that it logged, if any.
        marks: lines of sessions.jsonl, to which each start that trains adds.
        diverged: whether a rank said that the loss is not finite.
    """

    code: int
    said: str
    step: int | None
    marks: int = field(default=0, compare=False)
    diverged: bool = False


def failure_of(code: int, tail: bytes, run_dir: Path | None) -> Failure:
    """The failure of a job with this exit code; `tail` is the end of its stderr. `run_dir`: None: a user's program."""
    if run_dir is None:
        return Failure(code, last_said(tail), None)
    marks = 0
    with contextlib.suppress(OSError):
        marks = (run_dir / "sessions.jsonl").read_bytes().count(b"\n")
    return Failure(code, last_said(tail), last_step(run_dir / "metrics.jsonl"), marks, DIVERGED.encode() in tail)


def last_said(tail: bytes) -> str:
    """The last line at the end of a job's stderr that begins with "hvd_cifar: "; "": there is none."""
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.startswith("hvd_cifar: ")]
    return lines[-1] if lines else ""


def reason_to_give_up(failures: Sequence[Failure], max_restarts: int) -> str | None:
    """Why the job does not restart after these failures; None: it restarts. No failure has a code in `FINAL`."""
    last = failures[-1]
    if last.diverged:
        return "its loss would not be finite again"
    # Else no rank ran: a host may be booting.
    ran = last.said or (len(failures) > 1 and last.marks > failures[-2].marks)
    if ran and last in failures[:-1] and last.step is not None:
        return f"it failed twice in the same way after step {last.step}"
    if len(failures) > max_restarts:
        return f"--max-restarts {max_restarts}"
    return None


def seconds_before(restart: int) -> float:
    """Seconds to wait before restart 1, 2, ...: they double each time, up to a minute."""
    return min(MAX_SECONDS, 2.0 ** (restart - 1))


def last_step(metrics: Path) -> int | None:
    """The last step with a log line in metrics.jsonl; None: there is none, or the file is on another host.

    Only the end of the file is read, which grows with the run, and which an elastic job looks at each second.
    """
    with contextlib.suppress(OSError), metrics.open("rb") as file:
        size, length = file.seek(0, os.SEEK_END), END_BYTES
        while True:
            file.seek(max(0, size - length))
            lines = file.read(length).splitlines()
            steps = (_step_of(line) for line in reversed(lines))
            if (step := next((step for step in steps if step is not None), None)) is not None or length >= size:
                return step
            length *= 8
    return None


def _step_of(line: bytes) -> int | None:
    """The step of a log line of training; None for another line: evaluations may be of earlier steps."""
    # A partial line of a killed run, or a foreign one, such as deeply nested or with an infinite step.
    with contextlib.suppress(ValueError, LookupError, TypeError, ArithmeticError, RecursionError):
        event = json.loads(line)
        return int(event["step"]) if event["event"] == "train" else None
    return None
