"""The launcher's environment variables: read before Horovod starts, and set for TensorFlow, Open MPI and Horovod."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvd_cifar.errors import UserError
from hvd_cifar.runtime import process

# A process's rank, by launcher: horovodrun over Gloo, mpirun, PMIx (srun, prte), PMI-1 and PMI-2.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# The same among the ranks of its host, by horovodrun, mpirun and srun.
LOCAL_RANK_VARIABLES = ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
# The number of ranks. PMIx sets none; under srun Slurm does.
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")

ELASTIC = "HVD_CIFAR_ELASTIC"  # an ElasticJob


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank, as the launcher set it; None without a launcher."""
    return _first_number(RANK_VARIABLES, environment)


def launched_local_rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's rank among those of its host, as the launcher set it; 0 where it sets none."""
    return _first_number(LOCAL_RANK_VARIABLES, environment) or 0


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """The number of ranks, as the launcher set it; 1 without a launcher, None where the launcher sets none."""
    return 1 if launched_rank(environment) is None else _first_number(SIZE_VARIABLES, environment)


def _first_number(names: Iterable[str], environment: Mapping[str, str]) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def copies(environ: Mapping[str, str]) -> int:
    """The number of tasks in this process's Slurm step; 1 outside of a step."""
    count = environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(count) if count.isdecimal() else 1


@dataclass(frozen=True)
class ElasticJob:
    """What the launcher tells the ranks of an elastic job.

    name: of the job; the same each time that its ranks start.
    ranks: times a rank's batch size, this gives the global batch.
    saves_only: ranks write a checkpoint of the newest state, and stop.
    """

    name: str
    ranks: int
    saves_only: bool = False

    def __str__(self) -> str:
        return f"{self.name}:{self.ranks}:{int(self.saves_only)}"


def elastic_job(environment: Mapping[str, str] = os.environ) -> ElasticJob | None:
    """The elastic job that this process belongs to, if any."""
    if not (text := environment.get(ELASTIC)):
        return None
    name, ranks, saves_only = text.split(":")
    return ElasticJob(name, int(ranks), saves_only == "1")


BESIDE = "HVD_CIFAR_BESIDE"  # a Beside


class Beside(NamedTuple):
    """How many ranks of the other job, training or validation, share a host with this one (`--validation-ranks`).

    before: those with slots before this job's, on the host of its first rank.
    after: those with slots after this job's, on the host of its last rank.
    """

    before: int
    after: int

    def __str__(self) -> str:
        return f"{self.before}:{self.after}"


def beside(environment: Mapping[str, str] = os.environ) -> Beside | None:
    """The other job's ranks; None: there is no other job."""
    text = environment.get(BESIDE)
    return Beside(*map(int, text.split(":"))) if text else None


# From the launcher: when it started the ranks, as Unix times with spaces between them; see `starts`.
STARTS = "HVD_CIFAR_STARTS"
# From the launcher: how its last starts ended, as a JSON list of lines; see `ends`.
ENDS = "HVD_CIFAR_ENDS"
_runs = itertools.count()  # of this process


def starts(environment: Mapping[str, str] = os.environ) -> list[float]:
    """Unix times at which the launcher began, noticed that the ranks had ended, started them again, noticed, ...

    Without a launcher: when this process began. For a later run of the same process: the current time.
    """
    if next(_runs):
        return [time.time()]
    return [float(word) for word in environment.get(STARTS, "").split()] or [process.began()]


def starts_of_job(environment: Mapping[str, str] = os.environ) -> str:
    """What all starts of ranks by one launcher have in common, elastic ones too; "": no launcher of this program."""
    return next(iter(environment.get(STARTS, "").split()), "")


def is_restart(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher has started these ranks before."""
    return len(environment.get(STARTS, "").split()) > 1


def ends(environment: Mapping[str, str] = os.environ) -> list[str]:
    """How the launcher's last starts of these ranks ended, a line each, the newest last."""
    found: list[str] = json.loads(environment.get(ENDS, "[]"))
    return found


def check_launcher(environment: Mapping[str, str] = os.environ, prefix: Path = Path(sys.prefix)) -> None:
    """Raise UserError where MPI would not join the tasks that a launcher started: each task would train alone.

    `prefix`: as for `prepare_mpi`.
    """
    tasks = copies(environment)
    if tasks > 1 and launched_rank(environment) is None:
        raise UserError(f"srun started {tasks} tasks, but none knows its rank: give srun --mpi=pmix, or use ./run.sh")
    size = launched_size(environment) or 1
    if size > 1 and _has_pmi_alone(environment) and _is_packaged(prefix):
        raise UserError(
            f"{size} processes were started through PMI (srun --mpi=pmi2, or MPICH's mpirun), which this environment's "
            "Open MPI does not know: give srun --mpi=pmix, or use ./run.sh"
        )


def _has_pmi_alone(environment: Mapping[str, str]) -> bool:
    """Whether PMI, which the packaged Open MPI does not know, numbers this process, and nothing else does."""
    return [name for name in RANK_VARIABLES if environment.get(name, "").isdecimal()] == ["PMI_RANK"]


def _is_packaged(prefix: Path) -> bool:
    return (prefix / "lib" / "libmpi.so.40").exists()


def prepare_tensorflow(environment: MutableMapping[str, str]) -> None:
    """Set variables that TensorFlow and Keras read at their import; the user's setting for TensorFlow stays.

    Args:
        environment: the variables; changed in place.
    """
    # On x86 processors without instructions for neural networks (AVX2 alone) TensorFlow leaves oneDNN off by default. A
    # step of tutorial then takes 1.8 times as long.
    if platform.machine() in ("x86_64", "AMD64"):
        environment.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    environment["KERAS_BACKEND"] = "tensorflow"  # a user's other Keras programs may have another one


def prepare_mpi(environment: MutableMapping[str, str], on_cpu: bool, prefix: Path = Path(sys.prefix)) -> None:
    """Set variables that Open MPI and Horovod read at their start, unless the user has set them.

    To be called before `hvd.init()`.

    Args:
        environment: the variables; changed in place.
        on_cpu: whether ranks compute on the CPU, and so share their cores with Horovod's polling thread.
        prefix: of the Python environment that holds the packaged Open MPI.
    """
    if launched_rank(environment) is None or (_has_pmi_alone(environment) and launched_size(environment) == 1):
        # A single process without mpirun needs no MPI daemon.
        environment.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
        # In a Slurm step (srun --pty bash) MPI would ask srun for the other ranks, and abort without an answer.
        environment.pop("SLURM_STEP_ID", None)
        if _is_packaged(prefix):
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
