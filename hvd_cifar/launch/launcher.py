"""From one command line to N ranks: `./run.sh [-np N] [-H HOSTS | --hostfile FILE] COMMAND [OPTIONS]`.

The command line is checked here once, before any rank starts. A single rank runs directly; several run under mpirun.
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

import hvd_cifar
from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.import_path import foreign
from hvd_cifar.launch import validators
from hvd_cifar.launch.cluster import slurm
from hvd_cifar.launch.cluster.hosts import is_local
from hvd_cifar.launch.here import ranks_of
from hvd_cifar.launch.job import complain, write
from hvd_cifar.launch.jobs import check_early, launch, launch_elastic
from hvd_cifar.launch.request import Request, parse, with_allocation
from hvd_cifar.runtime.environment import copies, launched_size

MODULES = ("horovod", "keras", "numpy", "tensorflow")  # whose place others in PYTHONPATH would take
ALONE = ("export", "predict", "report")  # commands that run in a single process, not as ranks


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
        if max(launched_size() or 1, copies(os.environ)) > 1:
            raise UserError("mpirun or srun started run.sh several times; it starts the ranks itself: call it once")
        if request.command[0] == "doctor":
            return _start_doctor(request, check)
        _note_foreign_modules(request)
        if request.is_program:
            _check_program(request.command[1:])
        settings = None if request.is_program else check(list(request.command))
        if request.settings.max_restarts or request.settings.elastic or request.settings.validation_ranks:
            request = _with_run_dir(request, settings)
        if request.command[0] in ALONE:
            if request.hosts or request.ranks not in (None, 1):
                raise UserError(f"{request.command[0]} runs in one process here: leave -np, -H and --hostfile out")
            return _become(request, list(request.command))
        return _start_ranks(request, settings)
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the ranks started
        return 130


def _start_ranks(request: Request, settings: Any) -> int:
    request = with_allocation(request, () if request.hosts else slurm.allocation(os.environ))
    if request.settings.elastic:
        return launch_elastic(request, settings)
    writes_here = not request.hosts or is_local(request.hosts[0].name)  # another host may have other folders
    if request.command[0] == "train" and request.run_dir == Path() and writes_here and not request.settings.dry_run:
        request = _with_run_dir(request, settings)
    ranks = request.ranks or ranks_of(request.hosts)
    if request.settings.validation_ranks:
        request, ranks = validators.set_apart(request, ranks)
    if settings is not None and not request.settings.dry_run:
        check_early(request, ranks, settings)
    return launch(request, ranks)


def _note_foreign_modules(request: Request) -> None:
    """Print a note where PYTHONPATH holds modules of the names of this environment's."""
    files = foreign(("hvd_cifar", *MODULES), os.environ, own=str(Path(hvd_cifar.__file__).parents[1]))
    if files and request.is_program:
        complain(f"note: your program imports {files[0]}, from PYTHONPATH, in the place of this environment's")
    elif files:
        complain(f"note: {files[0]}, from PYTHONPATH, is not imported: this environment's packages come first")


def _stop_early(number: int, _: object) -> None:
    complain(f"{signal.Signals(number).name} before any rank has started (exit code {RESUME})")
    raise SystemExit(RESUME)


def _with_run_dir(request: Request, settings: Any) -> Request:
    """The request with its run directory: restarts and validation ranks need it, and code 0 is compared with it.

    Raises UserError where the command does not train.
    """
    if request.is_program and not request.settings.validation_ranks:
        if request.settings.elastic:
            raise UserError("--elastic goes with train: horovodrun --gloo --min-np starts a program's elastic ranks")
        return request  # a program restarts from checkpoints of its own
    if not isinstance(settings, config.TrainSettings):
        if request.settings.validation_ranks:
            raise UserError("--validation-ranks goes with train: no other command has weights to evaluate")
        option = "--elastic" if request.settings.elastic else "--max-restarts"
        raise UserError(f"{option} goes with train: no other command can be resumed")
    # Rank 0 makes the folder seconds later: other launchers of this second must have other names.
    run_dir = settings.run_dir or config.unused_run_dir(settings.model, str(os.getpid()))
    of_run_dir = () if settings.run_dir else ("--run-dir", str(run_dir))
    # --resume never is for the first start. A restart resumes the run that it began.
    of_restarts = ("--resume", "auto") if settings.resume == "never" else ()
    return replace(request, command=request.command + of_run_dir, of_restarts=of_restarts, run_dir=run_dir)


def _check_program(words: tuple[str, ...]) -> None:
    """Raise UserError where a user's program does not exist; else each rank's Python would report it."""
    if not words:
        raise UserError("python: name a program: ./run.sh -np 2 python PROGRAM.py")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise UserError(f"python {words[0]}: no such file")


def _start_doctor(request: Request, check: Callable[[list[str]], Any]) -> int:
    """Run the doctor, which starts ranks itself, with the launcher's options."""
    if request.settings.max_restarts or request.settings.elastic:
        raise UserError("--max-restarts and --elastic go with train: leave them out")
    words = list(request.command)
    words += ["--allreduce", "ring"] if request.settings.allreduce == "ring" else []
    words += ["-np", str(request.ranks)] if request.ranks else []
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)] if request.hosts else []
    check(words)
    return _become(request, words)


def _become(request: Request, words: list[str]) -> int:
    """Replace this process by a command that needs no launcher; with --dry-run print the command."""
    words = [sys.executable, *ISOLATED, "-m", "hvd_cifar", *words]
    if request.settings.dry_run:
        write(1, os.fsencode(f"{shlex.join(words)}\n"))
        return 0
    os.execv(words[0], words)
