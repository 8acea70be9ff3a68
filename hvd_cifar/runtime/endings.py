"""How a rank ends a job that it leaves in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

from hvd_cifar.errors import TrainingError, cause_of

GRACE_SECONDS = 2.0  # where all ranks leave, rank 0 speaks for all, and its end ends the others
# A rank that ends shuts Horovod down, and only then its process ends: the launcher must see that end first, to name it.
SECONDS_FOR_FIRST = 10.0


@contextlib.contextmanager
def no_early_success(rank: int) -> Iterator[None]:
    """A block in which `os._exit(0)` of the user's code is told, and ends this process with code 1."""
    true_exit, process = os._exit, os.getpid()

    def end(code: int) -> NoReturn:
        if code == 0 and os.getpid() == process:  # not a forked child
            os.write(2, f"hvd_cifar: rank {rank} ended first, with exit code 0, before the job was over\n".encode())
            code = 1
        true_exit(code)

    os._exit = end  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = true_exit


def leave(rank: int, left: SystemExit, alone: bool) -> NoReturn:
    """End this process, and so the job, where the user's code left a run by `sys.exit`. One line names the rank.

    The exit code is that of the user's code; 1 where that is 0 or a text, since the run is not complete.

    Raises:
        TrainingError: with this code and line, where the rank is alone: a program may go on.
    """
    code = left.code if isinstance(left.code, int) and 0 < left.code < 256 else 1
    told = f"rank {rank} ended first, with exit code {code}: {cause_of(left)}"
    if alone:
        error = TrainingError(told)
        error.code = code
        raise error from left
    if rank:
        time.sleep(GRACE_SECONDS)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, os.fsencode(f"hvd_cifar: {told}\n"))
    os._exit(code)  # Horovod's end in this process would first end the other ranks, with exit codes of their own
