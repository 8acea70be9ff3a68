"""Child processes that do not outlive their parent. Standard library only."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Callable

# Of Linux's prctl.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def signalled_with_parent(number: signal.Signals) -> Callable[[], None]:
    """A `preexec_fn` for Popen: Linux sends the child this signal when its parent ends, for whatever reason."""
    libc = ctypes.CDLL(None)  # before the fork: after it, loading might wait for a lock that another thread held

    def ask_for_signal() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number)

    return ask_for_signal


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent ends: it can find and end them then."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
