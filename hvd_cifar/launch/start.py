"""Starts the ranks: the command, its variables and what is shown of its output, without mpirun's tags and banners."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
from dataclasses import replace
from pathlib import Path

from hvd_cifar.errors import UserError
from hvd_cifar.launch import validators
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import hosts_of_ranks, is_local
from hvd_cifar.launch.cluster.network import Network, find_network
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.launch.command import command
from hvd_cifar.launch.here import gpus_here, note_gpus
from hvd_cifar.launch.job import Starter, write
from hvd_cifar.launch.request import Request
from hvd_cifar.runtime.environment import LAUNCH, prepare_tensorflow
from hvd_cifar.runtime.transport import RING_VARIABLES

SHOW_CURSOR = b"\x1b[?25h"


def make_starter(request: Request, ranks: int) -> Starter:
    """Find the network between the hosts, and make the command that starts the ranks. Raises UserError."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    env = {
        **os.environ,
        "PATH": path,
        **(RING_VARIABLES if request.settings.allreduce == "ring" else {}),
        **request.variables,
    }
    if request.is_program:
        prepare_tensorflow(env)  # the program may import TensorFlow before this package, which does the same
        env.pop("PYTHONHOME", None)  # as an environment's `activate` does: it names another Python's library
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise UserError("no mpirun on PATH; load its module again, or run: ./run.sh setup")
    if Path(mpirun).parent == bin_folder:
        env.setdefault("OPAL_PREFIX", str(bin_folder.parent))
    if request.in_slurm:
        env["SLURM_EXPORT_ENV"] = "ALL"  # mpirun's daemons need PATH and OPAL_PREFIX, also after sbatch --export=NONE
    if _is_watched(ranks):
        # Ranks cannot see whether this is so: mpirun gives them a pseudo-terminal in any case.
        env |= {"HVD_CIFAR_TERMINAL": "1", **_terminal_size()}
    if not request.settings.dry_run:
        env[LAUNCH] = ""  # so that mpirun exports it; `Job` sets its value
    of_ranks = hosts_of_ranks(request.hosts, ranks)
    env |= validators.neighbours(request.validators, of_ranks[-1])
    request = replace(request, hosts=tuple(host for host in request.hosts if host.name in of_ranks))
    network, gpus = _ask_hosts(request, bin_folder)
    if not request.is_again:
        note_gpus(gpus or {socket.gethostname(): gpus_here()}, all_here=network is None)
    words = command(request, ranks, mpirun, env, network)
    proof = request.run_dir / "summary.json" if request.run_dir != Path() and is_local(of_ranks[0]) else None
    return Starter(words, env, of_ranks if network else [], proof)


def _ask_hosts(request: Request, bin_folder: Path) -> tuple[Network | None, dict[str, int]]:
    """The network between the hosts, and the number of GPUs of each; None and {} where all ranks run here.

    Raises UserError.
    """
    names = [host.name for host in request.hosts]
    here = next((name for name in names if is_local(name)), None)
    if all(map(is_local, names)):
        return None, {}
    if " " in str(bin_folder):
        raise UserError(f"mpirun starts nothing on other hosts from a path with spaces: move {bin_folder.parents[1]}")
    # This machine takes part even without ranks: it starts them.
    everyone = names if here else [socket.gethostname(), *names]
    way = slurm if request.in_slurm else ssh
    participants = Participants(everyone, here or socket.gethostname(), sys.executable, way)
    network, reports = find_network(participants)
    return network, {name: reports[name].gpus for name in names}


def _is_watched(ranks: int) -> bool:
    """Whether several ranks run under mpirun, and their output goes to a terminal."""
    return sys.stdout.isatty() and ranks > 1


def _terminal_size() -> dict[str, str]:
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(columns), "LINES": str(lines)}


def leave_terminal(ranks: int, code: int) -> None:
    """Show the cursor again, which a killed rank leaves hidden, with its progress bar."""
    if _is_watched(ranks) and code >= 128:
        write(1, SHOW_CURSOR + b"\n")


def as_typed(starter: Starter) -> str:
    """The command as typed in a shell, with the variables that differ from this process's before it."""
    env = starter.env.items()
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in env if os.environ.get(k) != v), shlex.join(starter.words)])
