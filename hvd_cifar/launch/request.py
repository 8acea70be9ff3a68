"""The launcher's options, parsed."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from hvd_cifar.errors import UserError
from hvd_cifar.launch.arguments import Parser
from hvd_cifar.launch.cluster.hosts import Host, count, is_local, read_hostfile
from hvd_cifar.launch.elastic import Discover, Options, script
from hvd_cifar.launch.roster import Sizes, parse_sizes

USAGE = (
    "./run.sh [-np N] [-H HOSTS | --hostfile FILE] [--allreduce ring|auto] [--max-restarts N] "
    "[--elastic MIN:MAX [--host-discovery-script FILE] [--elastic-timeout S] [--cool-down FIRST:LONGEST]] "
    "[--validation-ranks K] [--dry-run] COMMAND [OPTIONS]"
)
ELASTIC_TIMEOUT, COOL_DOWN = 600, (10.0, 300.0)  # s
# The options, and how each begins, since a command's parser takes -np for -n and p.
OPTIONS = {
    **{"-n": "-np N", "-H": "-H HOSTS"},
    **{name: name for name in ("--hostfile", "--allreduce", "--max-restarts", "--validation-ranks", "--elastic")},
    **{name: name for name in ("--host-discovery-script", "--elastic-timeout", "--cool-down", "--dry-run")},
}
PYTHON = "python"  # the command that runs a user's own program on each rank


@dataclass(frozen=True)
class Request:
    """The launcher's options, and the command."""

    ranks: int | None
    hosts: tuple[Host, ...]
    command: tuple[str, ...]
    dry_run: bool = False
    ring: bool = False
    max_restarts: int = 0
    run_dir: Path = Path()  # set for --max-restarts, --elastic and --validation-ranks
    of_restarts: tuple[str, ...] = ()  # options that restarts add to the command
    elastic: Options | None = None
    discover: Discover | None = None  # of an elastic job: lists the current hosts; None: they do not change
    is_again: bool = False  # not the first start of an elastic job
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones for the ranks
    validation_ranks: int = 0
    validators: tuple[Host, ...] = ()  # the slots that `validators.set_apart` reserves for validation ranks
    in_slurm: bool = False  # the hosts are the nodes of this process's Slurm allocation


def parse(argv: list[str]) -> Request:
    """Parse the launcher's options. The command begins at the first word that is not one; by default it is `train`.

    "--" may stand between them. Raises UserError.
    """
    parser = Parser(USAGE)
    parser.add_argument("-np", "-n", dest="ranks", type=lambda text: count(text, f"-np {text}"))
    parser.add_argument("--allreduce", choices=["ring", "auto"])
    parser.add_argument("--max-restarts", type=lambda text: count(text, f"--max-restarts {text}"), default=0)
    parser.add_argument("--validation-ranks", type=lambda text: count(text, f"--validation-ranks {text}"), default=0)
    parser.add_argument("--elastic", type=parse_sizes)
    parser.add_argument("--host-discovery-script", type=Path)
    parser.add_argument("--elastic-timeout", type=lambda text: count(text, f"--elastic-timeout {text}"))
    parser.add_argument("--cool-down", type=_cool_down)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(
            f"{unknown[0]} is not an option of the launcher ({USAGE}); a command's options follow the command"
        )
    _check_slots(found.ranks, found.hosts, "slot", "the hosts; lower it or add slots")
    words = found.command[1:] if found.command[:1] == ["--"] else found.command
    command = _of_python(tuple(words) or ("train",))
    ring = found.allreduce == "ring"
    request = Request(found.ranks, found.hosts, command, found.dry_run, ring, found.max_restarts)
    return _with_elastic(replace(request, validation_ranks=found.validation_ranks), found)


def _of_python(command: tuple[str, ...]) -> tuple[str, ...]:
    """The command, as `python PROGRAM ...` where it is written as such in another way. Raises UserError."""
    word, *rest = command
    path = Path(word)
    if re.fullmatch(r"python3?(\.\d+)?", path.name):
        if path.parent != Path() and not (path.exists() and path.absolute().parent == Path(sys.executable).parent):
            raise UserError(f"{word}: ranks run in this environment's Python; write python {' '.join(rest)}")
        command = (PYTHON, *rest)
    elif path.suffix == ".py":
        command = (PYTHON, word, *rest)
    if command[0] == PYTHON and "-" in command[1:2]:
        raise UserError("python -: ranks have no standard input; write the program to a file: python PROGRAM.py")
    return command


def _with_elastic(request: Request, found: argparse.Namespace) -> Request:
    """The request with the options of an elastic job, if it is one. Raises UserError."""
    sizes: Sizes | None = found.elastic
    if sizes is None:
        for option in ("host_discovery_script", "elastic_timeout", "cool_down"):
            if getattr(found, option) is not None:
                raise UserError(f"--{option.replace('_', '-')} goes with --elastic MIN:MAX")
        return request
    if request.ranks and not sizes.least <= request.ranks <= sizes.most:
        raise UserError(f"-np {request.ranks} is not within --elastic {sizes.least}:{sizes.most}")
    if request.max_restarts:
        raise UserError("--elastic starts ranks again by itself: leave --max-restarts out")
    discover: Discover | None = None
    if found.host_discovery_script:
        if request.hosts:
            raise UserError("--host-discovery-script names the hosts: leave -H and --hostfile out")
        discover = script(found.host_discovery_script.absolute())
    elif found.hostfile:
        if not found.hostfile.is_file():
            raise UserError(f"--hostfile {found.hostfile}: --elastic reads it again and again: give a file")
        discover = partial(read_hostfile, found.hostfile)
    options = Options(sizes, request.ranks, found.elastic_timeout or ELASTIC_TIMEOUT, found.cool_down or COOL_DOWN)
    return replace(request, elastic=options, discover=discover)


def _cool_down(text: str) -> tuple[float, float]:
    first, _, longest = text.partition(":")
    what = f"--cool-down {text}: write FIRST:LONGEST seconds, such as 10:300"
    found = float(count(first, what, 0)), float(count(longest, what, 0))
    if found[0] > found[1]:
        raise UserError(f"--cool-down {text}: the first is more than the longest")
    return found


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
