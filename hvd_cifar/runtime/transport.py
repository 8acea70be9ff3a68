"""The all-reduce's algorithm and transport, as the job's environment variables configure them.

The transport may differ from the configured one: where shared memory is short, MPI silently falls back to TCP.

Open MPI uses the algorithm of `coll_tuned_allreduce_algorithm` if dynamic rules are on. Otherwise it chooses by message
size and number of ranks (ompi_coll_tuned_allreduce_intra_dec_fixed in its source). mpirun passes its -mca parameters to
ranks as environment variables.
"""

from __future__ import annotations

from collections.abc import Mapping

# The settings for a ring: -mca parameters of mpirun, and a variable for NCCL. Gloo's all-reduce is always a ring.
RING_PARAMETERS = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"}
RING_VARIABLES = {"NCCL_ALGO": "Ring"}


def algorithm(
    controller: str, by_nccl: bool, environ: Mapping[str, str], hosts: int = 1, two_levels: bool = False
) -> str:
    """The all-reduce's algorithm, such as "ring" or "MPI's choice".

    Args:
        controller: "mpi" or "gloo".
        by_nccl: whether NCCL reduces the gradients, on GPUs.
        environ: the rank's variables.
        hosts: the number of hosts.
        two_levels: whether there are several, each with the same number of ranks above 1; Horovod's own rings then
            have two levels.
    """
    if by_nccl:
        return environ.get("NCCL_ALGO", "NCCL's choice").lower().replace("nccl", "NCCL")
    # Between hosts Horovod itself sends the ring's messages; see its patch.
    if controller == "gloo" or (hosts > 1 and environ.get("HOROVOD_SHARES_CORE") == "1"):
        return "ring in two levels" if two_levels else "ring"
    is_ring = all(environ.get(f"OMPI_MCA_{name}") == value for name, value in RING_PARAMETERS.items())
    return "ring" if is_ring else "MPI's choice"


def transport(controller: str, by_nccl: bool, environ: Mapping[str, str], hosts: int) -> str:
    """What carries messages, such as "shared memory" or "TCP (10.0.0.0/24) and shared memory".

    Args:
        controller, by_nccl, environ, hosts: as for `algorithm`.
    """
    if by_nccl:
        return "NCCL"
    if controller == "gloo":
        card = environ.get("HOROVOD_GLOO_IFACE")
        return f"TCP ({card})" if card else "TCP"
    if environ.get("OMPI_MCA_pml") != "ob1":  # others have transports of their own, such as UCX
        return "MPI's transport"
    if hosts == 1:
        return "shared memory"
    network = environ.get("OMPI_MCA_btl_tcp_if_include")
    return f"TCP ({network}) and shared memory" if network else "TCP and shared memory"
