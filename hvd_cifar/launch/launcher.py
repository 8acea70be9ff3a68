"""From one command line to N ranks: `./run.sh [-np N] [-H HOSTS | --hostfile FILE] COMMAND [OPTIONS]`.

The command line is checked here once, before any rank starts. A single rank runs directly; several run under mpirun.
Other hosts need an ssh server, and the environment at the same path. In a Slurm
allocation the hosts are its nodes, and Slurm instead of ssh starts mpirun's daemons. `cluster.network` finds the
network between the hosts. The user sees the output of the ranks without tags and banners, and gets the job's exit code.
This process does not import TensorFlow, which takes seconds.
"""

from __future__ import annotations

import itertools
import os
import resource
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import hvd_cifar
from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.import_path import foreign
from hvd_cifar.launch import preflight, validators
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import (
    Host,
    hosts_of_ranks,
    is_local,
    ranks_by_default,
)
from hvd_cifar.launch.cluster.network import Network, find_network
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.launch.command import Installation, command
from hvd_cifar.launch.elastic import ElasticRun
from hvd_cifar.launch.install.installer import read_record, recorded_options
from hvd_cifar.launch.job import Job, complain, write
from hvd_cifar.launch.request import PYTHON, Request, parse, with_allocation
from hvd_cifar.launch.restarts import FINAL, Failure, failure_of, reason_to_give_up, seconds_before
from hvd_cifar.launch.roster import slots_of
from hvd_cifar.launch.starters import Ready, start
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import ENDS, STARTS, copies, launched_size, prepare_tensorflow
from hvd_cifar.runtime.stalls import FLOOR
from hvd_cifar.runtime.transport import RING_VARIABLES

SHOW_CURSOR = b"\x1b[?25h"
HOSTS_SHOWN = 3
# Enough for 20,000 hosts. Programs that close every number they might have open take long with millions.
FILES = 65_536
MODULES = ("horovod", "keras", "numpy", "tensorflow")  # whose place others in PYTHONPATH would take
ALONE = ("export", "predict", "report", "watch")  # commands that run in a single process, not as ranks


def main(argv: list[str], check: Callable[[list[str]], Any]) -> int:
    """Run the job that `argv` describes, and return its exit code.

    `check` returns the settings of the command's options, and ends the process if they are wrong.
    """
    _raise_limit_of_files()
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
            if request.max_restarts or request.elastic:
                raise UserError("--max-restarts and --elastic go with train: leave them out")
            words = _with_hosts(request)
            check(words)
            return _become(request, words)
        if request.command[0] == "tensorboard":
            return _start_tensorboard(request)
        _note_foreign_modules(request)
        if request.command[0] == PYTHON:
            _check_program(request.command[1:])
            settings = None
        else:
            settings = check(list(request.command))
        if request.max_restarts or request.elastic or request.validation_ranks:
            request = _with_run_dir(request, settings)
        if request.command[0] in ALONE:
            return _start_alone(request, settings)
        request = with_allocation(request, () if request.hosts else slurm.allocation(os.environ))
        if request.elastic:
            assert isinstance(settings, config.TrainSettings)
            return _launch_elastic(request, settings)
        stall_seconds = _stall_seconds(settings) if isinstance(settings, config.TrainSettings) else 0.0
        ranks = request.ranks or (1 if _measures_nothing(request.command) else _ranks_of(request.hosts))
        if request.validation_ranks:
            request, ranks = validators.set_apart(request, ranks)
        if settings is not None and not request.dry_run:
            _check_early(request, ranks, settings)
        return _launch(request, ranks, stall_seconds)
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the ranks started
        return 130


def _note_foreign_modules(request: Request) -> None:
    """Print a note where PYTHONPATH holds modules of the names of this environment's."""
    files = foreign(("hvd_cifar", *MODULES), os.environ, own=str(Path(hvd_cifar.__file__).parents[1]))
    if files and request.command[0] == PYTHON:
        complain(f"note: your program imports {files[0]}, from PYTHONPATH, in the place of this environment's")
    elif files:
        complain(f"note: {files[0]}, from PYTHONPATH, is not imported: this environment's packages come first")


def _raise_limit_of_files() -> None:
    """Let this process and its children open as many files as they may, since it holds three pipes to each host."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _stop_early(number: int, _: object) -> None:
    complain(f"{signal.Signals(number).name} before any rank has started (exit code {RESUME})")
    raise SystemExit(RESUME)


def _with_run_dir(request: Request, settings: Any) -> Request:
    """The request with its run directory, which restarts and validation ranks need to know.

    Raises UserError where the command does not train.
    """
    if not isinstance(settings, config.TrainSettings):
        if request.validation_ranks:
            raise UserError("--validation-ranks goes with train: no other command has weights to evaluate")
        option = "--elastic" if request.elastic else "--max-restarts"
        raise UserError(f"{option} goes with train: no other command can be resumed")
    # Rank 0 makes the folder seconds later: other launchers of this second must have other names.
    run_dir = settings.run_dir or config.unused_run_dir(settings.model, str(os.getpid()))
    of_run_dir = () if settings.run_dir else ("--run-dir", str(run_dir))
    # --resume never is for the first start. A restart resumes the run that it began.
    of_restarts = ("--resume", "auto") if settings.resume == "never" else ()
    return replace(request, command=request.command + of_run_dir, of_restarts=of_restarts, run_dir=run_dir)


def _measures_nothing(words: tuple[str, ...]) -> bool:
    """Whether the command predicts from two files without measuring, for which one rank is enough."""
    return words[:2] == ("benchmark", "predict") and {"--step", "--allreduce"} <= {w.partition("=")[0] for w in words}


def _check_program(words: tuple[str, ...]) -> None:
    """Raise UserError where a user's program does not exist; else each rank's Python would report it."""
    if not words:
        raise UserError("python: name a program: ./run.sh -np 2 python PROGRAM.py")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise UserError(f"python {words[0]}: no such file")


def _ranks_of(hosts: tuple[Host, ...]) -> int:
    """All slots of the named hosts. Without hosts, one rank per GPU that the environment can use, else one per core."""
    if hosts:
        return sum(host.slots for host in hosts)
    return ranks_by_default(_gpus_here() if _is_for_gpus() else 0, _cores_here())


def _check_early(request: Request, ranks: int, settings: Any) -> None:
    """Raise UserError for errors that can be found before any rank starts."""
    of_ranks = hosts_of_ranks(request.hosts, ranks) or ["localhost"] * ranks
    local = {name: is_local(name) for name in dict.fromkeys(of_ranks)}
    sees_files, on_gpus = local[of_ranks[0]], _is_for_gpus()
    preflight.check(settings, ranks, sees_files=sees_files, on_gpus=on_gpus, warn=complain)
    here = sum(local[name] for name in of_ranks) + sum(host.slots for host in request.validators if is_local(host.name))
    preflight.check_memory(here, devices.available_memory(swap=True))


def _cores_here() -> int:
    return devices.usable_cores(len(os.sched_getaffinity(0)), devices.cpu_quota())


def _gpus_here() -> int:
    return len(devices.visible_gpus(devices.list_gpus(), os.environ))


def _is_for_gpus() -> bool:
    return recorded_options(read_record()).gpu


def _note_gpus(gpus: Mapping[str, int], all_here: bool) -> None:
    """Print a note if GPUs stay unused, or a host of a GPU environment has none. `gpus`: number on each host."""
    for_gpus = _is_for_gpus()
    if for_gpus and devices.hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return  # the user's choice
    told = [host if for_gpus else f"{count} on {host}" for host, count in gpus.items() if bool(count) != for_gpus]
    if not told:
        return
    hosts = ", ".join(told[:HOSTS_SHOWN])
    hosts += f" and {len(told) - HOSTS_SHOWN} more hosts" if len(told) > HOSTS_SHOWN else ""
    if for_gpus:
        complain(f"note: ranks compute on the CPU: nvidia-smi lists no GPU on {hosts}; is the driver loaded?")
    else:
        set_up = f"./run.sh setup --gpu{' --hostfile FILE' * (not all_here)}"
        complain(
            f"note: ranks compute on the CPU, and GPUs stay unused ({hosts}): "
            f"the environment is for the CPU; to use them: {set_up}"
        )


def _with_hosts(request: Request) -> list[str]:
    """The doctor's command line with the launcher's options, since the doctor starts ranks itself."""
    words = list(request.command)
    words += ["--allreduce", "ring"] if request.ring else []
    words += ["-np", str(request.ranks)] if request.ranks else []
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)] if request.hosts else []
    return words


def _start_alone(request: Request, settings: Any) -> int:
    """Run a command in a single process on this machine."""
    if request.hosts or request.ranks not in (None, 1):
        raise UserError(f"{request.command[0]} runs in one process, on this machine: leave -np, -H and --hostfile out")
    if not request.dry_run:
        preflight.check(settings, 1, sees_files=True, on_gpus=_is_for_gpus(), warn=complain)
    return _become(request, list(request.command))


def _become(request: Request, words: list[str], module: str = "hvd_cifar") -> int:
    """Replace this process by a module's program; with --dry-run print the command."""
    words = [sys.executable, *ISOLATED, "-m", module, *words]
    if request.dry_run:
        write(1, os.fsencode(f"{shlex.join(words)}\n"))
        return 0
    os.execv(words[0], words)


def _start_tensorboard(request: Request) -> int:
    """Run TensorBoard in this process on a run, or on all runs in a folder."""
    _, *words = request.command
    if not words or words[0].startswith("-"):
        raise UserError("tensorboard: name a run: ./run.sh tensorboard RUN_DIR [ARGUMENTS OF TENSORBOARD]")
    if request.ranks or request.hosts:
        raise UserError("tensorboard runs in one process, on this machine: leave -np, -H and --hostfile out")
    if next(Path(words[0]).glob("**/events.out.tfevents.*"), None) is None:
        raise UserError(f"tensorboard {words[0]}: no event file is there; give the folder of a run, or of several runs")
    return _become(request, ["--logdir", *words], module="tensorboard.main")


def _make_ready(request: Request, ranks: int) -> Ready:
    """Find the network between the hosts, and make the command that starts the ranks. Raises UserError."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, **(RING_VARIABLES if request.ring else {}), **request.variables}
    if request.command[0] == PYTHON:
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
    if not request.dry_run:
        env |= {STARTS: "", ENDS: "[]"}  # so that mpirun exports them; `Job` sets their values
    of_ranks = hosts_of_ranks(request.hosts, ranks)
    env |= validators.neighbours(request.validators, of_ranks[-1] if of_ranks else "localhost")
    request = replace(request, hosts=tuple(host for host in request.hosts if host.name in of_ranks))
    network, gpus = _ask_hosts(request, bin_folder)
    if not _measures_nothing(request.command) and not request.is_again:
        _note_gpus(gpus or {socket.gethostname(): _gpus_here()}, all_here=network is None)
    installed = Installation(sys.executable, mpirun, os.geteuid() == 0)
    words = command(request, ranks, installed, env, network)
    return Ready(words, env, of_ranks if network else [])


def _launch(request: Request, ranks: int, stall_seconds: float) -> int:
    ready = _make_ready(request, ranks)
    if request.dry_run:
        write(1, os.fsencode(f"{_as_typed(ready.words, ready.env)}\n"))
        if request.validators:
            write(1, os.fsencode(f"{shlex.join(validators.words(request))}\n"))
        return 0
    if ready.words[0] == sys.executable and not request.max_restarts and not request.validators:
        os.execve(ready.words[0], ready.words, ready.env)

    cores, all_ranks = _cores_here(), ranks + request.validation_ranks
    if all_ranks > cores and not ready.hosts:
        complain(f"note: {all_ranks} ranks share {cores} core{'s' * (cores > 1)}: results are right, but slow")
    job = Job(can_stop=request.command[0] == "train", stall_seconds=stall_seconds)
    with validators.beside(request, hosts_of_ranks(request.hosts, ranks) or ["localhost"] * ranks):
        code = start(ready, job)
        if request.max_restarts:
            ready = replace(ready, words=[*ready.words, *request.of_restarts])
            code = _restart(code, request, job, lambda: start(ready, job))
    _leave_terminal(ranks, code)
    return code


def _launch_elastic(request: Request, settings: config.TrainSettings) -> int:
    """Run an elastic job; see `launch.elastic`."""
    assert request.elastic
    sizes = replace(request.elastic.sizes, shards=settings.virtual_shards)
    asked = f"--elastic {sizes.least}:{sizes.most}"
    if sizes.fitting(sizes.most) < sizes.least:
        raise UserError(f"{asked}: no number in between divides --virtual-shards {sizes.shards}")
    if request.ranks:
        config.check_ranks(settings, request.ranks)
    # A rank whose micro-batches would be empty cannot start.
    micro_batches = (settings.global_batch_size or 0) // settings.gradient_accumulation
    if limit := micro_batches or (settings.batch_size or 0) * (request.ranks or 0):
        sizes = replace(sizes, most=max(sizes.least, min(sizes.most, limit)))
    options = replace(request.elastic, sizes=sizes, batch_size=settings.batch_size)
    if request.validation_ranks:
        request = validators.set_apart_elastic(request)
    hosts, least = request.hosts or (Host("localhost", sizes.most),), request.ranks or sizes.least
    if not request.discover and slots_of(hosts) < least:
        raise UserError(
            f"{asked}: {least} ranks are needed, and the hosts have {slots_of(hosts)} slots"
            f"{' beside the validation ranks' * bool(request.validation_ranks)}; give more, or hosts that may change "
            "(--hostfile, --host-discovery-script)"
        )
    # Without validation ranks a script is asked for hosts only when the job starts.
    known = bool(request.hosts or not request.discover)
    awaited = request.ranks or 0  # by the first start, if they are not there yet
    ranks = max(awaited, sizes.fitting(slots_of(hosts))) if known or not awaited else awaited
    if request.dry_run:
        return _launch(replace(request, ranks=ranks), ranks, 0.0)
    if known:
        _check_early(request, ranks, settings)
    job = Job(can_stop=True, stall_seconds=_stall_seconds(settings))
    starts = itertools.count()

    def start_on(chosen: tuple[Host, ...], variables: Mapping[str, str]) -> int:
        is_again = next(starts) > 0
        words = request.command + (request.of_restarts if is_again else ())
        given = chosen if request.hosts or request.discover else ()  # (): this machine, which messages do not name
        now = replace(request, hosts=given, command=words, variables=variables, is_again=is_again)
        return start(_make_ready(now, slots_of(chosen)), job)

    way = slurm if request.in_slurm else ssh
    run = ElasticRun(options, request.discover or (lambda: hosts), start_on, job, request.run_dir, way.words)
    try:
        with validators.beside(request, hosts_of_ranks(hosts, ranks)):
            code = run.run()
    finally:
        run.clean_up()
    _leave_terminal(2, code)
    return code


def _stall_seconds(settings: config.TrainSettings) -> float:
    return FLOOR if settings.stall_seconds is None else settings.stall_seconds


def _is_watched(ranks: int) -> bool:
    """Whether several ranks run under mpirun, and their output goes to a terminal."""
    return sys.stdout.isatty() and ranks > 1


def _terminal_size() -> dict[str, str]:
    columns, lines = shutil.get_terminal_size()
    return {"COLUMNS": str(columns), "LINES": str(lines)}


def _leave_terminal(ranks: int, code: int) -> None:
    if _is_watched(ranks) and code >= 128:
        write(1, SHOW_CURSOR + b"\n")  # a killed rank leaves its progress bar and a hidden cursor


def _restart(code: int, request: Request, job: Job, start: Callable[[], int]) -> int:
    """Restart a failed job until it succeeds, is stopped or is given up. Return its exit code."""
    failures: list[Failure] = []
    while code not in FINAL and not job.asked:
        failures.append(failure_of(code, job.tail, request.run_dir))
        if reason := reason_to_give_up(failures, request.max_restarts):
            complain(f"exit code {code}; the job does not start again: {reason}")
            return code
        seconds = seconds_before(len(failures))
        complain(
            f"exit code {code}; restart {len(failures)} of {request.max_restarts} in {seconds:g} s, "
            f"from the newest checkpoint in {request.run_dir}"
        )
        if not job.wait(seconds):
            return RESUME
        code = start()
    return code


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


def _as_typed(words: list[str], env: Mapping[str, str]) -> str:
    """The command as typed in a shell, with the variables that differ from this process's before it."""
    differing = [f"{name}={shlex.quote(value)}" for name, value in env.items() if os.environ.get(name) != value]
    return " ".join([*differing, shlex.join(words)])
