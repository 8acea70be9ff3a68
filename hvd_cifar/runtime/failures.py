"""What a failed collective says: whether another rank is gone, or something else is wrong."""

from __future__ import annotations

import re

import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

# A rank that ends, for whatever reason, shuts Horovod down for all (SHUT_DOWN_ERROR in common.h of Horovod 0.28.1).
# A connection that breaks during a collective over Gloo is told by Gloo's transport (gloo/transport/tcp/pair.cc).
# Over MPI a broken connection raises nothing here: MPI ends the process.
LOSSES = (r"(Horovod has been shut down)\.", r"gloo/transport/[^\]\n]*\] ([^\n]+?)(?: \[Op:|$)")


def lost_rank(failure: BaseException) -> str | None:
    """What Horovod says of the loss of another rank; None where the failure is any other.

    Others are ranks that disagree (shapes, types, roots: FailedPreconditionError), NCCL, a wrong use of Horovod, and
    errors of a graph that happens to hold a collective. Horovod has no type or code for the loss: its text tells.
    """
    if not isinstance(failure, (tf.errors.UnknownError, HorovodInternalError)):
        return None
    found = (re.search(pattern, str(failure), re.MULTILINE) for pattern in LOSSES)
    return next((match[1] for match in found if match), None)
