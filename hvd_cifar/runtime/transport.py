"""Which algorithm adds the gradients up, and what carries them: as far as the job's variables say.

It is what MPI was set to use: where shared memory is short, MPI goes over TCP, and says nothing of it.

Under Open MPI the algorithm is the one of `coll_tuned_allreduce_algorithm`, where dynamic rules let it count; else MPI
chooses by message and number of ranks (ompi_coll_tuned_allreduce_intra_dec_fixed, in Open MPI's source). mpirun puts
its -mca parameters into each rank's variables.
"""

from __future__ import annotations

from collections.abc import Mapping

# Open MPI 4.1, coll_tuned_allreduce.c; a message with fewer values than ranks is doubled in any case.
ALGORITHMS = {
    "1": "linear",
    "2": "reduce and broadcast",
    "3": "recursive doubling",
    "4": "ring",
    "5": "segmented ring",
    "6": "Rabenseifner",
}
# What makes it a ring: for mpirun as -mca, for NCCL as a variable. Gloo's all-reduce is one, whatever is set.
RING_PARAMETERS = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"}
RING_VARIABLES = {"NCCL_ALGO": "Ring"}


def algorithm(controller: str, by_nccl: bool, environ: Mapping[str, str]) -> str:
    """The all-reduce that runs, such as "ring" or "MPI's choice".

    Args:
        controller: "mpi" or "gloo".
        by_nccl: whether gradients lie on GPUs and NCCL adds them up.
        environ: of the rank.
    """
    if by_nccl:
        return environ.get("NCCL_ALGO", "NCCL's choice").lower().replace("nccl", "NCCL")
    if controller == "gloo":
        return "ring"
    chosen = environ.get("OMPI_MCA_coll_tuned_allreduce_algorithm", "0")
    dynamic = environ.get("OMPI_MCA_coll_tuned_use_dynamic_rules", "0").lower() in ("1", "true", "yes", "enabled")
    return ALGORITHMS.get(chosen, "MPI's choice") if dynamic else "MPI's choice"


def transport(controller: str, by_nccl: bool, environ: Mapping[str, str], hosts: int) -> str:
    """What carries messages, such as "shared memory" or "TCP (10.0.0.0/24) and shared memory".

    Args:
        controller, by_nccl, environ: as for `algorithm`.
        hosts: how many the job runs on.
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
