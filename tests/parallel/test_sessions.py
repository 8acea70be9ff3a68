"""The life of a rank: several sessions in one process, and the errors of failed collectives."""

from __future__ import annotations

from typing import Any

from hvd_cifar.runtime.environment import prepare_mpi
from tests.ranks import run_ranks


def _life() -> dict[str, Any]:
    """Two sessions that end well, one whose ranks disagree, and one whose rank 1 leaves early."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_cifar.runtime.world import session, start

    def failure_of(function: Any) -> list[str]:
        try:
            function()
        except Exception as error:
            return [type(error).__name__, str(error), type(error.__cause__).__name__]
        return []

    def sum_of_ranks() -> list[float]:
        with session(threads=1) as world:
            return [float(hvd.allreduce(tf.constant(world.rank + 1.0), op=hvd.Sum)), world.threads]

    def disagree() -> None:
        with session() as world:
            hvd.allreduce(tf.zeros(3 + world.rank), name="a")

    @tf.function
    def reduce(values: Any) -> Any:
        return hvd.allreduce(values, name="b")

    def disagree_in_graph() -> None:
        with session() as world:
            reduce(tf.zeros(3, tf.float64 if world.rank else tf.float32))

    def leave_early() -> None:
        with session() as world:
            if world.rank == 1:
                hvd.shutdown()
                return
            for _ in range(1000):
                reduce(tf.zeros(3))

    return {
        "sums": [sum_of_ranks(), sum_of_ranks()],
        "same world": start() is start(threads=1),
        "other threads": failure_of(lambda: start(threads=2)),
        "deterministic": failure_of(lambda: start(deterministic=True)),
        "shapes": failure_of(disagree),
        "types": failure_of(disagree_in_graph),
        "left": failure_of(leave_early),
    }


def test_a_process_has_several_sessions_and_its_errors_are_told() -> None:
    lives = run_ranks(_life, 2, fresh=True)
    for life in lives:
        assert life["sums"] == [[3.0, 1], [3.0, 1]] and life["same world"] is True
        for name, kind, text in (
            # What TensorFlow cannot change any more.
            ("other threads", "UserError", "--threads-per-rank 2: TensorFlow runs with 1 since the first run"),
            ("deterministic", "UserError", "--deterministic: "),
            # Ranks that disagree.
            ("shapes", "FailedPreconditionError", "sent a tensor of shape [4]"),
            ("types", "FailedPreconditionError", "One rank had type"),
        ):
            assert life[name][0] == kind and text in life[name][1]
    text = "rank 0 lost another rank, which ended first; see that one's error (Horovod has been shut down)"
    assert lives[0]["left"] == ["TrainingError", text, "UnknownError"]
    # The rank itself: it cannot start Horovod again, and the end of its session fails.
    assert lives[1]["left"] != [] and lives[1]["left"][0] != "TrainingError"


def _start(computes: bool) -> str:
    import tensorflow as tf

    from hvd_cifar.errors import UserError
    from hvd_cifar.runtime.world import start

    if computes:
        tf.zeros(1)
    try:
        start(threads=1)
    except UserError as error:
        return str(error)
    return ""


def test_a_start_that_cannot_be_right_is_refused_in_one_line() -> None:
    """TensorFlow has computed before it; another MPI's launcher has started the first of two such ranks."""
    (text,) = run_ranks(_start, 1, True, launcher="")
    assert "TensorFlow has computed in this process before Horovod started" in text
    alone: dict[str, str] = {}
    prepare_mpi(alone, on_cpu=False)  # whose MPI finds no daemon to tell it of the other
    launched = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    (text,) = run_ranks(_start, 1, False, launcher="", env=alone | launched)
    assert text == "the launcher started 2 ranks, but MPI joined 1: use the mpirun of this environment, or ./run.sh"
