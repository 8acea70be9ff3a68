"""From one command line to N ranks: `./run.sh [-np N] [-H HOSTS | --hostfile FILE] COMMAND [OPTIONS]`.

The command line is checked here once, before any rank starts. Ranks run under mpirun.
Other hosts need an ssh server, and the environment at the same path. In a Slurm allocation the hosts are its nodes, and
Slurm instead of ssh starts mpirun's daemons. `cluster.network` finds the network between the hosts. The user sees the
output of the ranks without tags and banners, and gets the job's exit code. This process does not import TensorFlow,
which takes seconds.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.files import complain, write
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster import slurm
from hvd_cifar.launch.cluster.hosts import is_local
from hvd_cifar.launch.command import Request, notes, parse, ranks_of, with_allocation
from hvd_cifar.launch.elastic import ElasticRun
from hvd_cifar.launch.jobs import launch
from hvd_cifar.runtime.environment import most_started

ALONE = ("doctor", "export", "predict", "report")  # commands that run in a single process, not as ranks


def main(argv: list[str], check: Callable[[list[str]], Any]) -> int:
    """Run the job that `argv` describes, and return its exit code.

    `check` returns the settings of the command's options, and ends the process if they are wrong.
    """
    try:
        request = parse(argv)
        if not Path(".").exists():
            raise UserError("the present folder has been removed: go to another one")
        if request.command[0] == "train":
            for number in (signal.SIGTERM, signal.SIGUSR1):  # until `Job` sets its own handlers
                signal.signal(number, _stop_early)
        if most_started() > 1:
            raise UserError("mpirun or srun started run.sh several times; it starts the ranks itself: call it once")
        settings = None if request.is_program else check(list(request.command))
        if request.command[0] in ALONE:
            return _become(request)
        return _start_ranks(request, settings)
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the ranks started
        return 130


def _become(request: Request) -> int:
    """Replace this process by a command that needs no launcher; with --dry-run print the command."""
    given, name = request.settings, request.command[0]
    if request.hosts or given.ranks not in (None, 1) or given.max_restarts or given.elastic or given.validation_ranks:
        raise UserError(f"{name} runs in one process here: give options of its own after its name")
    words = [sys.executable, *ISOLATED, "-m", "hvd_cifar", *request.command]
    if given.dry_run:
        write(1, os.fsencode(f"{shlex.join(words)}\n"))
        return 0
    os.execv(words[0], words)


def _start_ranks(request: Request, settings: Any) -> int:
    given = request.settings
    if request.is_program:
        _check_program(request)
    elif not isinstance(settings, config.TrainSettings):
        for option in ("max_restarts", "elastic", "validation_ranks"):
            if getattr(given, option):
                raise UserError(f"{config.option_name(option)} goes with train: no other command can be resumed")
    if not request.hosts and (nodes := slurm.allocation(os.environ)):
        request = with_allocation(request, nodes)
    writes_here = not request.hosts or is_local(request.hosts[0].name)  # another host may have other folders
    keeps = given.max_restarts or given.elastic or given.validation_ranks or writes_here and not given.dry_run
    if request.command[0] == "train" and keeps:
        request = _with_run_dir(request, settings)
    for note in notes(settings, request.hosts):
        complain(note)
    if given.elastic and not given.dry_run:
        return ElasticRun(request, settings).run()
    first = ElasticRun(request, settings).first if given.elastic else request
    return launch(replace(first, ranks=first.ranks or ranks_of(first.hosts)), settings)


def _with_run_dir(request: Request, settings: config.TrainSettings) -> Request:
    """The request with its run directory: restarts and validation ranks need it, and code 0 is compared with it."""
    # Rank 0 makes the folder seconds later: other launchers of this second must have other names.
    run_dir = settings.run_dir or config.unused_run_dir(settings.model, str(os.getpid()))
    of_run_dir = () if settings.run_dir else ("--run-dir", str(run_dir))
    return replace(request, command=request.command + of_run_dir, run_dir=run_dir)


def _stop_early(number: int, _: object) -> None:
    complain(f"{signal.Signals(number).name} before any rank has started (exit code {RESUME})")
    raise SystemExit(RESUME)


def _check_program(request: Request) -> None:
    """Raise UserError where a user's program does not exist, which each rank's Python would report, or is elastic."""
    words = request.command[1:]
    if not words:
        raise UserError("python: name a program: ./run.sh -np 2 python PROGRAM.py")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise UserError(f"python {words[0]}: no such file")
    if request.settings.elastic or request.settings.validation_ranks:
        raise UserError(
            "--elastic and --validation-ranks go with train; horovodrun --gloo --min-np MIN --host-discovery-script "
            "FILE starts a program elastically"
        )
