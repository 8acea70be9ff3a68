"""Which all-reduce runs, and over what, as the job's variables say it."""

from __future__ import annotations

import pytest

from hvd_cifar.runtime.transport import algorithm, transport

RING = {"OMPI_MCA_coll_tuned_use_dynamic_rules": "1", "OMPI_MCA_coll_tuned_allreduce_algorithm": "4"}
SHARED = {"HOROVOD_SHARES_CORE": "1"}
OB1 = {"OMPI_MCA_pml": "ob1"}


@pytest.mark.parametrize(
    ("controller", "by_nccl", "environ", "hosts", "expected"),
    [
        ("mpi", False, {}, 1, "MPI's choice"),
        ("mpi", False, RING, 1, "ring"),
        ("mpi", False, {**RING, "OMPI_MCA_coll_tuned_use_dynamic_rules": "0"}, 2, "MPI's choice"),
        ("gloo", False, {}, 1, "ring"),
        ("mpi", False, SHARED, 1, "MPI's choice"),
        ("mpi", False, SHARED, 2, "ring"),
        ("mpi", True, RING, 2, "NCCL's choice"),
        ("gloo", True, {"NCCL_ALGO": "Ring"}, 2, "ring"),
    ],
)
def test_algorithm(controller: str, by_nccl: bool, environ: dict[str, str], hosts: int, expected: str) -> None:
    assert algorithm(controller, by_nccl, environ, hosts) == expected


def test_only_horovod_s_own_rings_have_two_levels() -> None:
    assert algorithm("gloo", False, {}, 2, True) == algorithm("mpi", False, SHARED, 2, True) == "ring in two levels"
    assert algorithm("mpi", False, RING, 2, True) == "ring" and algorithm("mpi", True, {}, 2, True) == "NCCL's choice"


@pytest.mark.parametrize(
    ("controller", "by_nccl", "environ", "hosts", "expected"),
    [
        ("mpi", False, {}, 1, "MPI's transport"),
        ("mpi", False, OB1, 1, "shared memory"),
        ("mpi", False, OB1, 2, "TCP and shared memory"),
        ("mpi", False, {**OB1, "OMPI_MCA_btl_tcp_if_include": "10.0.0.0/24"}, 2, "TCP (10.0.0.0/24) and shared memory"),
        ("gloo", False, {"HOROVOD_GLOO_IFACE": "eth0"}, 2, "TCP (eth0)"),
        ("gloo", True, {}, 2, "NCCL"),
    ],
)
def test_transport(controller: str, by_nccl: bool, environ: dict[str, str], hosts: int, expected: str) -> None:
    assert transport(controller, by_nccl, environ, hosts) == expected
