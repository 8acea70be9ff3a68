"""What Slurm's variables say of a job: hosts, tasks, and ranks that do not know each other."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import slurm
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.runtime.environment import check_launcher

# `scontrol show hostnames a,b` of a machine without Slurm: names separated by commas, and nothing else.
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "scontrol"
    program.write_text(SCONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return program


@pytest.mark.parametrize(
    ("text", "tasks"),
    [("1", [1]), ("8(x3)", [8, 8, 8]), ("2,1", [2, 1]), ("2(x2),1,4(x2)", [2, 2, 1, 4, 4]), ("16(x1)", [16])],
)
def test_tasks_per_node(text: str, tasks: list[int]) -> None:
    assert slurm.tasks_per_node(text) == tasks


def test_the_nodes_of_an_allocation(scontrol: Path) -> None:
    variables = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1,n2,n3", "SLURM_TASKS_PER_NODE": "4(x2),1"}
    assert slurm.allocation(variables) == (Host("n1", 4), Host("n2", 4), Host("n3", 1))
    for name in variables:
        assert slurm.allocation({k: v for k, v in variables.items() if k != name}) == ()
    with pytest.raises(UserError, match="on 1 of the 3 nodes"):
        slurm.allocation(variables | {"SLURM_TASKS_PER_NODE": "1"})
    scontrol.unlink()
    with pytest.raises(UserError, match="scontrol does not list the Slurm nodes .*, such as -H localhost:4"):
        slurm.allocation(variables)
    here = {**variables, "SLURM_JOB_NODELIST": socket.gethostname(), "SLURM_TASKS_PER_NODE": "2"}
    assert slurm.allocation(here) == (Host(socket.gethostname(), 2),)


@pytest.mark.parametrize(
    ("variables", "lost"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_RANK": "1"}, False),  # mpirun, whose daemons srun started
    ],
)
def test_ranks_that_do_not_know_of_each_other(variables: dict[str, str], lost: bool) -> None:
    if not lost:
        check_launcher(variables)
        return
    with pytest.raises(UserError, match="2 processes were started, .* but none knows its rank: give srun --mpi=pmix"):
        check_launcher(variables)


def test_why_srun_started_nothing() -> None:
    said = "srun: error: x\nsrun: error: Unable to create step: Requested node configuration is not available\n"
    assert slurm.diagnose("n2", said) == (
        "srun on n2: srun: error: Unable to create step: Requested node configuration is not available",
        "see scontrol show node n2",
    )
