"""The life of a rank: several sessions in one process, what ranks know of each other, errors of collectives."""

from __future__ import annotations

from typing import Any

from hvd_cifar.runtime.environment import prepare_mpi
from tests.ranks import error_of, run_ranks


def _life() -> dict[str, Any]:
    """Two sessions that end well, one whose ranks disagree, and one whose rank 1 leaves early."""
    import horovod.tensorflow as hvd
    import tensorflow as tf

    from hvd_cifar.runtime.environment import launched_rank
    from hvd_cifar.runtime.watch import Watch
    from hvd_cifar.runtime.world import session, start

    threads, watch = 1 + (launched_rank() or 0), Watch(60)

    def sum_and_facts() -> list[Any]:
        with session(threads=threads, watch=watch) as world:
            known = [(facts.host == world.host, facts.first, facts.threads) for facts in world.ranks]
            total = float(hvd.allreduce(tf.constant(world.rank + 1.0), op=hvd.Sum))
            return [total, world.threads, known, len(watch.peers), [repr(facts) for facts in world.ranks]]

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
        "sums": [sum_and_facts(), sum_and_facts()],
        "same world": start() is start(threads=threads),
        "other threads": error_of(start, threads=3),
        "deterministic": error_of(start, deterministic=True),
        "shapes": error_of(disagree),
        "types": error_of(disagree_in_graph),
        "left": error_of(leave_early),
    }


def test_a_process_has_several_sessions_and_its_errors_are_told() -> None:
    lives = run_ranks(_life, 2, fresh=True)
    assert lives[0]["sums"][0][-1] == lives[1]["sums"][0][-1]  # the facts of all ranks
    for rank, life in enumerate(lives):
        for total, threads, known, peers, _ in life["sums"]:
            assert (total, threads, peers) == (3.0, rank + 1, 2) and known == [[True, 0, 1], [True, 0, 2]]
        assert life["same world"] is True
        for name, kind, text in (
            # What TensorFlow cannot change any more.
            ("other threads", "UserError", f"--threads-per-rank 3: TensorFlow runs with {rank + 1} since"),
            ("deterministic", "UserError", "--deterministic: "),
            # Ranks that disagree.
            ("shapes", "FailedPreconditionError", "sent a tensor of shape [4]"),
            ("types", "FailedPreconditionError", "One rank had type"),
        ):
            assert life[name].startswith(kind) and text in life[name]
    text = "rank 0 lost another rank, which ended first; see that one's error (Horovod has been shut down)"
    assert lives[0]["left"] == f"TrainingError: {text}"
    # The rank itself: it cannot start Horovod again, and the end of its session fails.
    assert not lives[1]["left"].startswith(("accepted", "TrainingError"))


def _start(computes: bool) -> str:
    import tensorflow as tf

    from hvd_cifar.runtime.world import start

    if computes:
        tf.zeros(1)
    return error_of(start, threads=1)


def test_a_start_that_cannot_be_right_is_refused_in_one_line() -> None:
    """TensorFlow has computed before it; another MPI's launcher has started the first of two such ranks."""
    (text,) = run_ranks(_start, 1, True, launcher="")
    assert "TensorFlow has computed in this process before Horovod started" in text
    alone: dict[str, str] = {}
    prepare_mpi(alone, on_cpu=False)  # whose MPI finds no daemon to tell it of the other
    launched = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    (text,) = run_ranks(_start, 1, False, launcher="", env=alone | launched)
    assert "the launcher started 2 ranks, but MPI joined 1: use the mpirun of this environment, or ./run.sh" in text
