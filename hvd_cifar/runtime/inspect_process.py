"""What Linux tells of the processes of this host: stopped ones, pending signals, ranks that are gone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from hvd_cifar.runtime.channel import GONE
from hvd_cifar.runtime.environment import launched_rank

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


def waited_for(mpirun: int) -> list[int]:
    """The ranks of this host that ended before they started MPI, and for which another one waits in MPI_Init.

    mpirun notices the end of a rank, with code 0, only where a rank of its host runs MPI by then. A rank has a
    connection to mpirun from MPI_Init to MPI_Finalize, both of which wait for all ranks. So one that is gone while
    another one is connected never had it.
    """
    with contextlib.suppress(psutil.Error, OSError, KeyError):
        files = Path(f"/proc/{mpirun}/task").glob("*/children")
        children = [psutil.Process(int(word)) for file in files for word in file.read_text().split()]
        ranks = {rank: child for child in children if (rank := launched_rank(child.environ())) is not None}
        if not ranks:
            return []
        one = next(iter(ranks.values())).environ()
        first = int(one["OMPI_COMM_WORLD_RANK"]) - int(one["OMPI_COMM_WORLD_LOCAL_RANK"])
        if absent := {*range(first, first + int(one["OMPI_COMM_WORLD_LOCAL_SIZE"]))} - {*ranks}:
            ports = {c.laddr.port for c in psutil.Process(mpirun).net_connections("tcp") if c.raddr}
            connections = (c for child in ranks.values() for c in child.net_connections("tcp"))
            return sorted(absent) if any(c.raddr and c.raddr.port in ports for c in connections) else []
    return []
