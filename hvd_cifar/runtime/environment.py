"""The launcher's environment variables: read before Horovod starts, and set for TensorFlow, Open MPI and Horovod."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvd_cifar.errors import UserError

# A process's rank, by launcher: horovodrun over Gloo, mpirun, PMIx (srun, prte).
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
# The same among the ranks of its host, by horovodrun, mpirun and srun.
LOCAL_RANK_VARIABLES = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
# The number of ranks. PMIx sets none; under srun Slurm does.
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
# What the launcher tells ranks, as JSON lists in these variables.
LAUNCH, ELASTIC, BESIDE = "HVD_CIFAR_LAUNCH", "HVD_CIFAR_ELASTIC", "HVD_CIFAR_BESIDE"
# The settings for an all-reduce in a ring: -mca parameters of mpirun, which it passes to ranks as variables, and a
# variable for NCCL. Gloo's all-reduce is always a ring.
RING_PARAMETERS = {"coll_tuned_use_dynamic_rules": "1", "coll_tuned_allreduce_algorithm": "4"}
RING_VARIABLES = {"NCCL_ALGO": "Ring"}

_runs = itertools.count()  # of this process


class Launch(NamedTuple):
    """A job, and its starts of ranks."""

    began: float  # Unix time, which identifies the job
    restarts: int = 0  # how often the launcher has started these ranks before
    ends: Sequence[str] = ()  # how the last of these starts ended, a line each, the newest last


class ElasticJob(NamedTuple):
    """An elastic job."""

    name: str  # the same each time that its ranks start
    ranks: int  # times a rank's batch size, this gives the global batch


class Beside(NamedTuple):
    """How many ranks of the other job, training or validation, share a host with this one (`--validation-ranks`)."""

    before: int  # with slots before this job's, on the host of its first rank
    after: int  # with slots after this job's, on the host of its last rank


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, as the launcher set it; None without a launcher."""
    return _first_number(RANK_VARIABLES, environment)


def launched_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank among those of its host, as the launcher set it; 0 where it sets none."""
    return _first_number(LOCAL_RANK_VARIABLES, environment) or 0


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks, as the launcher set it; 1 without a launcher, None where the launcher sets none."""
    return 1 if launched_rank(environment) is None else _first_number(SIZE_VARIABLES, environment)


def most_started(environment: Mapping[str, str] = os.environ) -> int:
    """The largest number of processes of which a launcher's variables say that it has started them."""
    values = (environment.get(name, "") for name in (*SIZE_VARIABLES, "PMI_SIZE"))
    return max((int(value) for value in values if value.isdecimal()), default=1)


def _first_number(names: Iterable[str], environment: Mapping[str, str]) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """What the launcher tells of the job; None: there is no launcher of this program."""
    return Launch(*told) if (told := _told(LAUNCH, environment)) else None


def launch_of_run() -> Launch:
    """The same for a run of this process. Without a launcher, and for later runs, the run is a job of its own."""
    if next(_runs):
        return Launch(time.time())
    return launch() or Launch(psutil.Process().create_time())


def elastic_job(environment: Mapping[str, str] = os.environ) -> ElasticJob | None:
    """The elastic job that this process belongs to, if any."""
    return ElasticJob(*told) if (told := _told(ELASTIC, environment)) else None


def beside(environment: Mapping[str, str] = os.environ) -> Beside | None:
    """The other job's ranks; None: there is no other job."""
    return Beside(*told) if (told := _told(BESIDE, environment)) else None


def _told(name: str, environment: Mapping[str, str]) -> list[Any]:
    found: list[Any] = json.loads(environment.get(name) or "[]")
    return found


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Raise UserError where MPI would not join the processes that a launcher started: each would train alone."""
    if (started := most_started(environment)) > 1 and launched_rank(environment) is None:
        raise UserError(
            f"{started} processes were started, by srun or MPICH's mpirun, but none knows its rank: give srun "
            "--mpi=pmix, or use ./run.sh"
        )


def prepare_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Set variables that TensorFlow and Keras read at their import; the user's setting for TensorFlow stays."""
    # On x86 processors without instructions for neural networks (AVX2 alone) TensorFlow leaves oneDNN off by default. A
    # step of tutorial then takes 1.8 times as long.
    if platform.machine() in ("x86_64", "AMD64"):
        environment.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    environment["KERAS_BACKEND"] = "tensorflow"  # a user's other Keras programs may have another one


def prepare_mpi(environment: MutableMapping[str, str], on_cpu: bool, prefix: Path = Path(sys.prefix)) -> None:
    """Set variables that Open MPI and Horovod read at their start, unless the user has set them.

    `on_cpu`: whether ranks compute on the CPU, and so share their cores with Horovod's polling thread. `prefix`: of the
    Python environment that holds the packaged Open MPI.
    """
    if launched_rank(environment) is None:
        # A single process without mpirun needs no MPI daemon.
        environment.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
        # In a Slurm step (srun --pty bash) MPI would ask srun for the other ranks, and abort without an answer.
        environment.pop("SLURM_STEP_ID", None)
        if (prefix / "lib" / "libmpi.so.40").exists():
            # The packaged Open MPI looks for its files in the folder of its build. mpirun sets this variable for ranks.
            environment.setdefault("OPAL_PREFIX", str(prefix))
    if on_cpu:
        # Horovod's thread polls MPI on the core that computes. Without yielding it takes 40% of the speed.
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        # ms. A gradient that misses a Horovod cycle waits for the next one.
        environment.setdefault("HOROVOD_CYCLE_TIME", "0.5")
        # ms. With nothing to reduce, a rank sleeps up to this long between cycles: each cycle synchronises all ranks.
        environment.setdefault("HOROVOD_IDLE_CYCLE_TIME", "50")
        # Horovod's thread sleeps while it waits for other hosts.
        environment.setdefault("HOROVOD_SHARES_CORE", "1")


def all_reduce(controller: str, by_nccl: bool, environ: Mapping[str, str], hosts: int, two_levels: bool = False) -> str:
    """The all-reduce's algorithm as the rank's variables ask for it, such as "ring" or "MPI's choice".

    `by_nccl`: whether NCCL reduces the gradients, on GPUs. `two_levels`: whether there are several hosts, each with the
    same number of ranks above 1; Horovod's own rings then have two levels.
    """
    if by_nccl:
        return environ.get("NCCL_ALGO", "NCCL's choice").lower().replace("nccl", "NCCL")
    # Between hosts Horovod itself sends the ring's messages; see its patch.
    if controller == "gloo" or (hosts > 1 and environ.get("HOROVOD_SHARES_CORE") == "1"):
        return "ring in two levels" if two_levels else "ring"
    is_ring = all(environ.get(f"OMPI_MCA_{name}") == value for name, value in RING_PARAMETERS.items())
    return "ring" if is_ring else "MPI's choice"


def mpi_network(environ: Mapping[str, str]) -> str:
    """The network of MPI's messages between hosts, where the launcher has chosen one: "10.0.0.0/24"; else ""."""
    return environ.get("OMPI_MCA_btl_tcp_if_include", "")


def tcp_network(environ: Mapping[str, str], by_nccl: bool, hosts: int) -> str:
    """The network whose TCP carries gradients between hosts; "" where there is none, or a user has chosen UCX."""
    is_tcp = hosts > 1 and not by_nccl and environ.get("OMPI_MCA_pml", "ob1") == "ob1"
    return mpi_network(environ) if is_tcp else ""


def address_here(environ: Mapping[str, str] = os.environ) -> str:
    """This host's address for ranks of other hosts: on the job's network where the launcher names one."""
    names = [environ.get("HOROVOD_GLOO_IFACE", ""), *mpi_network(environ).split(",")]
    networks = [ipaddress.ip_network(name, strict=False) for name in names if "/" in name]
    cards = psutil.net_if_addrs().items()
    found = [(card, a.address) for card, every in cards for a in every if a.family == socket.AF_INET]
    for card, address in found:
        if card in names or any(ipaddress.ip_address(address) in network for network in networks):
            return address
    return next((address for _, address in found if not address.startswith("127.")), "127.0.0.1")
