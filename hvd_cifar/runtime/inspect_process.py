"""What Linux tells of this host's processes: which are ranks of a job, and whether one is stopped or computes."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from hvd_cifar.runtime.channel import GONE
from hvd_cifar.runtime.environment import launched_rank

STOPPED = "its process is stopped (SIGSTOP or a debugger)"
# A launcher's variables with the job's number.
JOB_VARIABLES = (
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
)


def state_of(pid: int) -> str:
    """Why a process does not run, as far as Linux tells."""
    try:
        state = psutil.Process(pid).status()
    except psutil.Error:
        return GONE
    if state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
        return STOPPED
    return GONE if state == psutil.STATUS_ZOMBIE else f"its Python does not run; state of its process: {state}"


def ranks_here(environ: Mapping[str, str] = os.environ) -> dict[int, list[int]]:
    """The processes of each of this job's ranks on this host: those with the same variables of the launcher."""
    own = {name: environ[name] for name in JOB_VARIABLES if name in environ}
    found: dict[int, list[int]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            theirs = process.environ()
            rank = launched_rank(theirs)
            if own and rank is not None and all(theirs.get(name) == value for name, value in own.items()):
                found.setdefault(rank, []).append(process.pid)
    return found


def computes(pid: int, left_out: Collection[int] = (), samples: int = 10, seconds: float = 0.05) -> bool:
    """Whether any thread of a process is runnable in at least half of the samples, or it uses a disk.

    This thread is left out. Disks of other hosts count; pipes, sockets and shared memory do not.
    """
    skipped, runs = {*left_out, threading.get_native_id()}, 0
    with contextlib.suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        before = process.io_counters()
        for _ in range(samples):
            runs += any(_is_runnable(pid, thread.id) for thread in process.threads() if thread.id not in skipped)
            time.sleep(seconds)
        after = process.io_counters()
        return runs >= samples / 2 or (after.read_bytes, after.write_bytes) != (before.read_bytes, before.write_bytes)
    return False


def _is_runnable(pid: int, thread: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return Path(f"/proc/{pid}/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "R"
    return False


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return state_of(pid) == STOPPED


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
