"""How a rank ends a job that it leaves in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from typing import NoReturn

from hvd_cifar.errors import cause_of

GRACE_SECONDS = 2.0  # where all ranks leave, rank 0 speaks for all, and its end ends the others


def leave(rank: int, left: SystemExit) -> NoReturn:
    """End this process, and so the job, where the user's code left a run by `sys.exit`. One line names the rank.

    The exit code is that of the user's code; 1 where that is 0 or a text, since the run is not complete.
    """
    code = left.code if isinstance(left.code, int) and 0 < left.code < 256 else 1
    if rank:
        time.sleep(GRACE_SECONDS)
    line = f"hvd_cifar: rank {rank} ended first, with exit code {code}: {cause_of(left)}\n"
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        os.write(2, os.fsencode(line))
    os._exit(code)  # Horovod's end in this process would first end the other ranks, with exit codes of their own
