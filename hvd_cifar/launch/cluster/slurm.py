"""The nodes of this Slurm job, and commands on them: through srun, without ssh."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host, is_local

FAILED = 1  # srun's exit code where it cannot start a task
# One task beside the job's own, without MPI. All is given, since srun takes missing options from the job.
SRUN = ("srun", "--quiet", "--overlap", "--mpi=none", "--nodes=1", "--ntasks=1")


def allocation(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The nodes of this process's allocation, with tasks as slots; () outside an allocation.

    Raises UserError where Slurm does not list them.
    """
    nodes, tasks = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_TASKS_PER_NODE")
    if not ("SLURM_JOB_ID" in environ and nodes and tasks):
        return ()
    try:
        words = ["scontrol", "show", "hostnames", nodes]
        names = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    except (OSError, subprocess.SubprocessError):
        names = [nodes]  # in a container there are Slurm's variables without its programs
        if not is_local(nodes):
            here = f"-H localhost:{tasks_per_node(tasks)[0]}"
            raise UserError(
                f"scontrol does not list the Slurm nodes {nodes}; name hosts with -H, such as {here}"
            ) from None
    slots = tasks_per_node(tasks)
    if len(names) != len(slots):  # in a step on some of the nodes, such as srun --pty bash
        raise UserError(f"this shell is on {len(slots)} of the {len(names)} nodes of the Slurm job; name hosts with -H")
    return tuple(Host(name, count) for name, count in zip(names, slots, strict=True))


def tasks_per_node(text: str) -> list[int]:
    """Each node's tasks, from Slurm's notation: 2(x3),1 is 2, 2, 2, 1 (sbatch's manual, SLURM_TASKS_PER_NODE)."""
    found = []
    for tasks, _, nodes in re.findall(r"(\d+)(\(x(\d+)\))?", text):
        found += [int(tasks)] * int(nodes or 1)
    return found


def words(host: str, command: Sequence[str]) -> list[str]:
    """The command that runs `command` on one node of the allocation."""
    return [*SRUN, f"--nodelist={host}", *command]


def diagnose(host: str, complaint: str) -> tuple[str, str]:
    """Why srun could not start a task on a node, and what to do, from its stderr."""
    said = [line.strip() for line in complaint.splitlines() if line.strip()]
    return f"srun on {host}: {said[-1] if said else 'it started nothing'}", f"see scontrol show node {host}"
