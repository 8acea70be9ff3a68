"""Errors of failed collectives, as ranks with Horovod 0.28.1 printed them."""

from __future__ import annotations

import pytest
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_cifar.errors import UserError
from hvd_cifar.runtime.world import lost_rank
from hvd_cifar.training.record import why_failed

EAGER = "{{function_node __wrapped__HorovodAllreduce_device_/job:localhost/replica:0/task:0/device:CPU:0}} "
SHUT_DOWN = "Horovod has been shut down. This was caused by an exception on one of the ranks or an attempt to allreduce"
GRAPH = """Graph execution error:

Detected at node HorovodAllreduce defined at (most recent call last):
  File "horovod/tensorflow/mpi_ops.py", line 130, in _allreduce
"""
GLOO = "[/build/horovod-0.28.1/third_party/compatible17_gloo/gloo/transport/tcp/pair.cc:589] "
RESET = "Read error [127.0.0.1]:14250: Connection reset by peer"
OP = " [Op:HorovodAllreduce] name: a"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (EAGER + SHUT_DOWN + OP, "Horovod has been shut down"),
        (
            f"{GRAPH}\n{SHUT_DOWN}\n\t [[{{{{node HorovodAllreduce}}}}]] [Op:__inference_reduce_12]",
            "Horovod has been s",
        ),
        (EAGER + GLOO + RESET + OP, RESET),
        (f"{GRAPH}\n{GLOO}{RESET}\n\t [[{{{{node HorovodAllreduce}}}}]]", RESET),
    ],
)
def test_the_loss_of_a_rank_is_told_with_its_cause(text: str, said: str) -> None:
    failure = tf.errors.UnknownError(None, None, text)
    found = lost_rank(failure)
    assert found is not None and found.startswith(said) and "\n" not in found and "[Op:" not in found
    assert lost_rank(HorovodInternalError(failure)) == found  # as Horovod's elastic wrappers raise it


@pytest.mark.parametrize(
    "failure",
    [
        tf.errors.FailedPreconditionError(None, None, EAGER + "Mismatched ALLREDUCE tensor shapes: One rank sent" + OP),
        tf.errors.InvalidArgumentError(None, None, GRAPH + "\ncheck_numerics: Tensor had NaN values"),
        tf.errors.UnknownError(None, None, EAGER + "NCCL async error: unhandled cuda error" + OP),
        ValueError(SHUT_DOWN),
    ],
)
def test_every_other_failure_is_none(failure: Exception) -> None:
    assert lost_rank(failure) is None


def test_the_record_of_a_run_says_in_a_line_why_it_fails() -> None:
    assert why_failed(UserError("no\nroom")) == "no room"
    assert "another rank is lost (Horovod" in why_failed(tf.errors.UnknownError(None, None, GRAPH + SHUT_DOWN))
    assert why_failed(OSError(28, "No space left on device")) == "OSError: No space left on device"
