"""When a failed job starts again, with `--max-restarts` and `--elastic`: its exit code, last words and last step."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from pathlib import Path

from hvd_cifar.errors import DIVERGED, OUT_OF_SYNC, RESUME

STARTS_WITHOUT_A_STEP = 3  # in a row, after which a job does not start again
END_BYTES = 65_536  # of metrics.jsonl: some hundred lines
# Exit codes after which a job never restarts: success, a user's error, stopped as asked, and a second Ctrl-C.
FINAL = (0, 2, RESUME, 128 + signal.SIGINT)


def is_hopeless(tail: bytes) -> bool:
    """Whether another start would fail in the same way, by the end of a job's stderr."""
    return DIVERGED.encode() in tail or OUT_OF_SYNC.encode() in tail


def last_said(tail: bytes) -> str:
    """The last line at the end of a job's stderr that begins with "hvd_cifar: "; "": there is none."""
    lines = [line for line in tail.decode(errors="replace").splitlines() if line.startswith("hvd_cifar: ")]
    return lines[-1] if lines else ""


def seconds_before(restart: int) -> float:
    """Seconds to wait before restart 1, 2, ...: they double each time, up to a minute."""
    return min(60.0, 2.0 ** (restart - 1))


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
    with contextlib.suppress(ValueError, LookupError, TypeError):  # a partial line of a killed run
        event = json.loads(line)
        return int(event["step"]) if event["event"] == "train" else None
    return None
