"""What the launcher says of this process before Horovod starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from hvd_cifar.errors import UserError

# The variables by which a launcher names a process's rank: horovodrun over Gloo, mpirun, PMIx (srun, prte), PMI-2.
RANK_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# And the number of ranks; PMIx has none, but Slurm does.
SIZE_VARIABLES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


def launched_rank(environment: Mapping[str, str] = os.environ) -> int | None:
    """This process's rank as its launcher set it, or None where no launcher did."""
    return _first_number(RANK_VARIABLES, environment)


def launched_size(environment: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks the launcher says it has started; 1 without a launcher, None where one does not say."""
    return 1 if launched_rank(environment) is None else _first_number(SIZE_VARIABLES, environment)


def under_mpi(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process for a job over MPI; horovodrun --gloo says that it is over Gloo."""
    return launched_rank(environment) is not None and environment.get("HOROVOD_CONTROLLER", "").lower() != "gloo"


def _first_number(names: Iterable[str], environment: Mapping[str, str]) -> int | None:
    values = (environment.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), None)


def copies(environ: Mapping[str, str]) -> int:
    """How many times srun started what this process is, or a part of."""
    count = environ.get("SLURM_STEP_NUM_TASKS", "")
    return int(count) if count.isdecimal() else 1


def check_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """UserError where srun started several ranks that do not know of each other: each would take itself for all."""
    tasks = copies(environment)
    if tasks > 1 and launched_rank(environment) is None:
        raise UserError(f"srun started {tasks} tasks, but none knows its rank: give srun --mpi=pmix, or use ./run.sh")


def prepare_mpi(environment: MutableMapping[str, str], on_cpu: bool, prefix: Path = Path(sys.prefix)) -> None:
    """Set, before `hvd.init()`, what Open MPI and Horovod read only at their start; what the user has set stays.

    Args:
        environment: is changed.
        on_cpu: whether the ranks compute on the CPU, where Horovod's polling thread would take their cores.
        prefix: of the Python environment, in which the packaged Open MPI lies.
    """
    if launched_rank(environment) is None:
        # A single process without mpirun: do not start MPI's daemon just to be alone.
        environment.setdefault("OMPI_MCA_ess_singleton_isolated", "1")
        # Nor ask srun for other ranks, in a step of one task (srun --pty bash), and end for want of an answer.
        environment.pop("SLURM_STEP_ID", None)
        if (prefix / "lib" / "libmpi.so.40").exists():
            # The packaged Open MPI looks for its files where it was built, unless it is told; its mpirun does tell.
            environment.setdefault("OPAL_PREFIX", str(prefix))
    if on_cpu:
        # Horovod's background thread waits for MPI by polling, on the core that should compute: 40% of the speed.
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
        # ms between two looks for gradients, once there are some: what just missed a look waits for the next one.
        environment.setdefault("HOROVOD_CYCLE_TIME", "0.5")
        # ms for which a rank with nothing to reduce sleeps at most; every look is a meeting of all ranks' threads.
        environment.setdefault("HOROVOD_IDLE_CYCLE_TIME", "50")
