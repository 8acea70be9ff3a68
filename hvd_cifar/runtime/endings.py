"""How a rank ends a job that it leaves in the middle of a run, and how it knows that another one is lost."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from typing import NoReturn

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_cifar.errors import TrainingError, cause_of
from hvd_cifar.files import complain

GRACE_SECONDS = 2.0  # where all ranks leave, rank 0 speaks for all, and its end ends the others
# A rank that ends shuts Horovod down, and only then its process ends: the launcher must see that end first, to name it.
SECONDS_FOR_FIRST = 10.0
# A rank that ends, for any reason, shuts Horovod down for all ranks (SHUT_DOWN_ERROR in common.h of Horovod 0.28.1).
# Over Gloo a broken connection raises an error of Gloo's transport (gloo/transport/tcp/pair.cc).
# Over MPI a broken connection raises no error here: MPI ends the process.
LOSSES = (r"(Horovod has been shut down)\.", r"gloo/transport/[^\]\n]*\] ([^\n]+?)(?: \[Op:|$)")


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
        complain(told)
    os._exit(code)  # Horovod's end in this process would first end the other ranks, with exit codes of their own


def lost_rank(failure: BaseException) -> str | None:
    """Horovod's words for the loss of another rank; None for any other failure.

    Other failures are disagreements of ranks (shapes, types, roots: FailedPreconditionError), errors of NCCL, wrong use
    of Horovod, and errors of a graph that contains a collective. Horovod has no type or code for the loss of a rank:
    its text identifies it.
    """
    if not isinstance(failure, (tf.errors.UnknownError, HorovodInternalError)):
        return None
    found = (re.search(pattern, str(failure), re.MULTILINE) for pattern in LOSSES)
    return next((match[1] for match in found if match), None)
