"""Processes of this host: children that do not outlive their parent, and what Linux tells of mpirun."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
from collections.abc import Callable
from pathlib import Path

# Of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def signalled_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for Popen: Linux sends the child this signal when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None)  # before the fork: after it, loading might wait for a lock that another thread held
    return lambda: libc.prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends: it can find and end them then."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def is_pending(pid: int, number: int) -> bool:
    """Whether a process has been sent a signal that it blocks."""
    with contextlib.suppress(OSError):
        found = re.search(r"(?m)^ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
        return found is not None and bool(int(found[1], 16) & 1 << number - 1)
    return False
