"""What Linux tells of this host's processes: whether one is stopped, or has been sent a signal that it blocks."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from hvd_cifar.runtime.channel import GONE

STOPPED = "its process is stopped (SIGSTOP or a debugger)"


def state_of(pid: int) -> str:
    """Why a process does not run, as far as Linux tells."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return GONE
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return GONE if state == psutil.STATUS_ZOMBIE else f"its Python does not run; state of its process: {state}"


def is_pending(pid: int, number: int) -> bool:
    """Whether a process has been sent a signal that it blocks."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("ShdPnd:"):
                return bool(int(line.split()[1], 16) & 1 << number - 1)
    return False
