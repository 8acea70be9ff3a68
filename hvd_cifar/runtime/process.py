"""Child processes that do not outlive their parent, and when this one began. Standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

# Of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def began() -> float:
    """The Unix time at which this process began, to 10 ms."""
    # Field 22 of proc(5), counted from the end of the program's name, which may hold spaces. psutil's create_time is
    # less exact: it adds this field to a boot time in whole seconds.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def signalled_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for Popen: Linux sends the child this signal when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None)  # before the fork: after it, loading might wait for a lock that another thread held

    def ask_for_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask_for_signal


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends: it can find and end them then."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
