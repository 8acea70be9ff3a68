"""Processes of this host: children that do not outlive their parent, and what Linux tells of mpirun and its ranks."""

from __future__ import annotations

import contextlib
import ctypes
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from hvd_cifar.runtime.environment import launched_rank

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


def waited_for(mpirun: int) -> list[int]:
    """The ranks of this host that ended before they started MPI, and for which another one waits in MPI_Init.

    mpirun notices the end of a rank, with code 0, only where a rank of its host runs MPI by then. A rank has a
    connection to mpirun from MPI_Init to MPI_Finalize, both of which wait for all ranks. So one that is gone while
    another one is connected never had it.
    """
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        files = Path(f"/proc/{mpirun}/task").glob("*/children")
        children = [psutil.Process(int(pid)) for file in files for pid in file.read_text().split()]
        ranks = {rank: child for child in children if (rank := launched_rank(child.environ())) is not None}
        env = ranks[min(ranks)].environ()
        first = min(ranks) - int(env["OMPI_COMM_WORLD_LOCAL_RANK"])
        if absent := {*range(first, first + int(env["OMPI_COMM_WORLD_LOCAL_SIZE"]))} - {*ranks}:
            ports = {c.laddr.port for c in psutil.Process(mpirun).net_connections("tcp") if c.raddr}
            connections = (c for child in ranks.values() for c in child.net_connections("tcp"))
            return sorted(absent) if any(c.raddr and c.raddr.port in ports for c in connections) else []
    return []
