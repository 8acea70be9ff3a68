"""Failed collectives: whether another rank is lost, or something else is wrong."""

from __future__ import annotations

import re

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

# A rank that ends, for any reason, shuts Horovod down for all ranks (SHUT_DOWN_ERROR in common.h of Horovod 0.28.1).
# Over Gloo a broken connection raises an error of Gloo's transport (gloo/transport/tcp/pair.cc).
# Over MPI a broken connection raises no error here: MPI ends the process.
LOSSES = (r"(Horovod has been shut down)\.", r"gloo/transport/[^\]\n]*\] ([^\n]+?)(?: \[Op:|$)")


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
