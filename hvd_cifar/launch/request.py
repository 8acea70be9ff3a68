"""What is to be started: the launcher's settings, the command, and what follows from both."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host, is_local, parse_hosts, read_hostfile
from hvd_cifar.launch.elastic import Discover
from hvd_cifar.launch.settings import LaunchSettings
from hvd_cifar.options import launcher_options

PYTHON = "python"  # the command that runs a user's own program on each rank


@dataclass(frozen=True)
class Request:
    """What is to be started.

    hosts: (): this machine.
    in_slurm: whether the hosts are the nodes of this process's Slurm allocation, which starts programs there.
    discover: lists the current hosts of an elastic job; None: they do not change.
    run_dir: set for --max-restarts, --elastic and --validation-ranks, and where rank 0 trains on this host.
    of_restarts: options that restarts add to the command.
    is_again: whether an elastic job has started before.
    variables: additional ones for the ranks.
    validators: the slots that `validators.set_apart` reserves for validation ranks.
    """

    settings: LaunchSettings
    command: tuple[str, ...]
    hosts: tuple[Host, ...] = ()
    in_slurm: bool = False
    discover: Discover | None = None
    run_dir: Path = Path()
    of_restarts: tuple[str, ...] = ()
    is_again: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    validators: tuple[Host, ...] = ()

    @property
    def ranks(self) -> int | None:
        """-np."""
        return self.settings.ranks

    @property
    def is_program(self) -> bool:
        """Whether the command is a program of the user's own."""
        return self.command[0] == PYTHON


def parse(argv: list[str]) -> Request:
    """The request of a command line. The command is `train` by default. Raises UserError."""
    settings, words = launcher_options(argv)
    hosts: tuple[Host, ...] = ()
    if settings.hosts is not None:
        hosts = parse_hosts(settings.hosts)
    elif settings.hostfile is not None:
        hosts = read_hostfile(settings.hostfile)
    _check_slots(settings.ranks, hosts, "slot", "the hosts; lower it or add slots")
    request = Request(settings, _of_python(words or ("train",)), hosts)
    if settings.elastic is None or settings.hostfile is None:
        return request
    if not settings.hostfile.is_file():
        raise UserError(f"--hostfile {settings.hostfile}: --elastic reads it again and again: give a file")
    return replace(request, discover=partial(read_hostfile, settings.hostfile))


def _of_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, as `python PROGRAM ...` where it is `python3 ...` or a file of Python."""
    if command[0] == "python3":
        return (PYTHON, *command[1:])
    return (PYTHON, *command) if command[0].endswith(".py") else command


def with_allocation(request: Request, nodes: tuple[Host, ...]) -> Request:
    """The request with the Slurm job's nodes as its hosts, unless it names hosts. `nodes` is () outside of a job.

    Raises UserError where it asks for more ranks than the job has tasks.
    """
    if request.hosts or not nodes:
        return request
    here = f", or -H localhost:{request.ranks}" if len(nodes) == 1 and is_local(nodes[0].name) else ""
    more = f"this Slurm job; lower it, or give sbatch or salloc --ntasks={request.ranks}{here}"
    _check_slots(request.ranks, nodes, "task", more)
    return replace(request, hosts=nodes, in_slurm=shutil.which("srun") is not None)


def _check_slots(ranks: int | None, hosts: tuple[Host, ...], kind: str, where: str) -> None:
    slots = sum(host.slots for host in hosts)
    if ranks and hosts and ranks > slots:
        raise UserError(f"-np {ranks} is more than the {slots} {kind}{'s' * (slots != 1)} of {where}")
