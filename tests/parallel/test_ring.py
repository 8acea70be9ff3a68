"""Whether Open MPI really adds up in a ring: the bits of a sum show the order in which its terms were added."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.runtime.environment import RING_PARAMETERS
from tests.ranks import run_ranks

RANKS = 4
VALUES = 64 * RANKS  # so few that MPI by itself would choose no ring


def _terms(rank: int) -> NDArray[np.float32]:
    return np.random.default_rng(rank).standard_normal(VALUES).astype(np.float32)


def _sum_through_mpi() -> list[float]:
    from mpi4py import MPI

    sums = np.empty(VALUES, np.float32)
    MPI.COMM_WORLD.Allreduce(_terms(MPI.COMM_WORLD.rank), sums)
    return [float(value) for value in sums]


def _in_ring() -> NDArray[np.float32]:
    """Block b goes round from rank b, and every rank adds its own terms to what has come."""
    sums = np.empty(VALUES, np.float32)
    for number, block in enumerate(np.split(np.arange(VALUES), RANKS)):
        total = _terms(number)[block]
        for step in range(1, RANKS):
            total = _terms((number + step) % RANKS)[block] + total
        sums[block] = total
    return sums


def test_ring_parameters_make_a_ring() -> None:
    expected = [float(value) for value in _in_ring()]
    env = {f"OMPI_MCA_{name}": value for name, value in RING_PARAMETERS.items()}
    assert run_ranks(_sum_through_mpi, RANKS, env=env, tensorflow=False) == [expected] * RANKS
    in_turn = np.sum([_terms(rank) for rank in range(RANKS)], axis=0)
    assert np.allclose(in_turn, expected) and in_turn.tolist() != expected  # the bits tell
