"""All-reduce through MPI itself, without Horovod: the baseline for the time that Horovod adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as hvd
from numpy.typing import NDArray


def why_not() -> str | None:
    """Why MPI cannot be used beside Horovod in this job; None: it can. The same on every rank."""
    if not hvd.mpi_enabled():
        return "the job runs over Gloo: start it with mpirun, or horovodrun --mpi"
    from mpi4py import MPI  # only here: under Gloo its import would try to start MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        return "this MPI refuses calls from several threads at once (no MPI_THREAD_MULTIPLE): Horovod makes some"
    return None


def make_sum(size: int) -> Callable[[NDArray[Any], NDArray[Any]], None] | None:
    """A function (terms, sums) that adds up arrays over ranks 0 .. size - 1; None on other ranks. A collective."""
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    ranks = everyone.Split(0 if everyone.rank < size else MPI.UNDEFINED, key=everyone.rank)
    if ranks == MPI.COMM_NULL:
        return None
    return lambda terms, sums: ranks.Allreduce(terms, sums, op=MPI.SUM)
