"""How a rank ends a job that it leaves in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import NoReturn

from hvd_cifar.errors import TrainingError, cause_of

GRACE_SECONDS = 2.0  # where all ranks leave, rank 0 speaks for all, and its end ends the others
# A rank that ends shuts Horovod down, and only then its process ends: the launcher must see that end first, to name it.
SECONDS_FOR_FIRST = 10.0


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
