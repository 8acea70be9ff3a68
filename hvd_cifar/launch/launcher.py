"""From one command line to N ranks: `./run.sh [-np N] [-H HOSTS | --hostfile FILE] [--mpi|--gloo] COMMAND [OPTIONS]`.

The command is checked here, once, before any rank starts. One rank runs without a launcher; several run under
mpirun, or under horovodrun with --gloo. Ranks on other hosts need ssh to them and the environment there at the same
path; within an allocation of Slurm its nodes are the hosts, and Slurm starts mpirun's daemons there instead of ssh.
The network that they use is found here (`cluster.network`). What the user reads is what the ranks print, without the
launcher's tags and pages; what the caller gets is the job's exit code. This process starts no TensorFlow.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from hvd_cifar.errors import UserError
from hvd_cifar.launch.arguments import Parser
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import (
    Host,
    count,
    hosts_of_ranks,
    is_local,
    ranks_by_default,
)
from hvd_cifar.launch.cluster.network import Network, find_network
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.launch.cluster.remarks import without_banners, without_tags
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank
from hvd_cifar.launch.install.installer import read_record, recorded_options
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import copies, launched_size
from hvd_cifar.runtime.process import signalled_with_parent
from hvd_cifar.runtime.transport import RING_PARAMETERS, RING_VARIABLES

USAGE = (
    "./run.sh [-np N] [-H HOSTS | --hostfile FILE] [--mpi|--gloo] [--allreduce ring|auto] [--dry-run] COMMAND [OPTIONS]"
)
# Ranks on other hosts get these of the user's variables; those on this host inherit all.
EXPORTED = re.compile(r"(HVD_CIFAR|HOROVOD|TF|NCCL)_\w+|PATH|LD_LIBRARY_PATH|PYTHONPATH|COLUMNS")
# How soon mpirun notices that a host is gone, in seconds and tries; by itself it would take eight minutes.
KEEPALIVE = {"oob_tcp_keepalive_time": 10, "oob_tcp_keepalive_intvl": 5, "oob_tcp_keepalive_probes": 4}
PYTHON = "python"  # the command that runs a user's own program on each rank
SECONDS_FOR_LAST_OUTPUT = 5.0
SHOW_CURSOR = b"\x1b[?25h"
HOSTS_SHOWN = 3


@dataclass(frozen=True)
class Request:
    """The launcher's part of the command line, and the command after it."""

    ranks: int | None
    hosts: tuple[Host, ...]
    gloo: bool
    command: tuple[str, ...]
    dry_run: bool = False
    ring: bool = False
    in_slurm: bool = False  # the hosts are those of this process's allocation


def main(argv: list[str], check: Callable[[list[str]], None]) -> int:
    """Launch what `argv` asks for; return the exit code of the job.

    `check` validates a command's own options, and ends the process where they are wrong.
    """
    try:
        request = parse(argv)
        if max(launched_size() or 1, copies(os.environ)) > 1:
            raise UserError("mpirun or srun started this several times; it starts the ranks itself: call it once")
        if request.command[0] == "doctor":
            return _start_doctor(request, check)
        if request.command[0] == PYTHON:
            _check_program(request.command[1:])
        else:
            check(list(request.command))
        request = with_allocation(request, slurm.allocation(os.environ))
        ranks = request.ranks or (1 if _measures_nothing(request.command) else _ranks_of(request.hosts))
        return _launch(request, ranks)
    except UserError as error:
        _complain(str(error))
        return 2
    except KeyboardInterrupt:  # while hosts were asked
        return 130


def parse(argv: list[str]) -> Request:
    """Read the launcher's options; all from the first other word on is the command, by default `train`.

    Raises UserError.
    """
    parser = Parser(USAGE)
    parser.add_argument("-np", "-n", dest="ranks", type=lambda text: count(text, f"-np {text}"))
    parser.add_argument("--mpi", dest="gloo", action="store_false")
    parser.add_argument("--gloo", dest="gloo", action="store_true")
    parser.add_argument("--allreduce", choices=["ring", "auto"])
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    parser.set_defaults(gloo=False)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        raise UserError(
            f"{unknown[0]} is not an option of the launcher ({USAGE}); a command's options follow the command"
        )
    _check_slots(found.ranks, found.hosts, "slot", "the hosts; lower it or add slots")
    command = tuple(found.command) or ("train",)
    return Request(found.ranks, found.hosts, found.gloo, command, found.dry_run, found.allreduce == "ring")


def with_allocation(request: Request, nodes: tuple[Host, ...]) -> Request:
    """The request on the nodes that Slurm gave to this job, () outside of one, unless it names hosts itself.

    Raises UserError where it wants more ranks than the job has tasks.
    """
    if request.hosts or not nodes:
        return request
    _check_slots(request.ranks, nodes, "task", "this Slurm job; lower it, or give sbatch or salloc --ntasks")
    return replace(request, hosts=nodes, in_slurm=True)


def _check_slots(ranks: int | None, hosts: tuple[Host, ...], kind: str, where: str) -> None:
    slots = sum(host.slots for host in hosts)
    if ranks and hosts and ranks > slots:
        raise UserError(f"-np {ranks} is more than the {slots} {kind}{'s' * (slots != 1)} of {where}")


def _measures_nothing(words: tuple[str, ...]) -> bool:
    """Whether a command is a prediction from two files, which takes no ranks."""
    return words[:2] == ("benchmark", "predict") and {"--step", "--allreduce"} <= {w.partition("=")[0] for w in words}


def _check_program(words: tuple[str, ...]) -> None:
    """UserError where a user's own program is not there: Python would say so once for each rank."""
    if not words:
        raise UserError("python: name a program: ./run.sh -np 2 python PROGRAM.py")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise UserError(f"python {words[0]}: no such file")


def _ranks_of(hosts: tuple[Host, ...]) -> int:
    """One for every slot; without named hosts, one per GPU that the environment can use, else one per core."""
    if hosts:
        return sum(host.slots for host in hosts)
    return ranks_by_default(_gpus_here() if _is_for_gpus() else 0, _cores_here())


def _cores_here() -> int:
    return devices.usable_cores(len(os.sched_getaffinity(0)), devices.cpu_quota())


def _gpus_here() -> int:
    return len(devices.visible_gpus(devices.list_gpus(), os.environ))


def _is_for_gpus() -> bool:
    return recorded_options(read_record()).gpu


def _note_unused_gpus(gpus: Mapping[str, int], all_here: bool) -> None:
    """Say that the environment cannot use these GPUs, which are counted by host."""
    have = [f"{count} on {host}" for host, count in gpus.items() if count]
    if have:
        more = f" and {len(have) - HOSTS_SHOWN} more hosts" if len(have) > HOSTS_SHOWN else ""
        set_up = f"./run.sh setup --gpu{' --hostfile FILE' * (not all_here)}"
        _complain(
            f"note: ranks compute on the CPU, and GPUs stay unused ({', '.join(have[:HOSTS_SHOWN])}{more}): "
            f"the environment is for the CPU; to use them: {set_up}"
        )


@dataclass(frozen=True)
class Installation:
    """What starts ranks.

    python: the interpreter of every rank, at the same path on every host; horovodrun is beside it.
    mpirun: its path.
    as_root: whether the user is root, for whom mpirun starts nothing unless told to.
    """

    python: str
    mpirun: str
    as_root: bool

    @property
    def bin_folder(self) -> Path:
        """The folder of the environment's programs."""
        return Path(self.python).parent


def command(
    request: Request, ranks: int, installed: Installation, environ: Mapping[str, str], network: Network | None = None
) -> list[str]:
    """The command that starts `ranks` ranks, as words.

    Args:
        request: its hosts and its command; without hosts all ranks run here.
        ranks: how many.
        installed: the programs that start them.
        environ: this process's variables, some of which ranks on other hosts need.
        network: what joins the hosts; None: all ranks run here.
    """
    # Ranks start in the folder of this process, and import from it and from PYTHONPATH, as under `python -m` here.
    own = request.command[0] == PYTHON
    python, bin_folder = installed.python, installed.bin_folder
    program = [python, *request.command[1:]] if own else [python, "-m", "hvd_cifar", *request.command]
    hosts = request.hosts or (Host("localhost", ranks),)
    if ranks == 1 and network is None:
        return program
    where = ["-np", str(ranks), "-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    if request.gloo:
        words = [str(bin_folder / "horovodrun"), "--gloo", *where]
        if network is not None:
            here = next(card.name for host, card in network.cards.items() if is_local(host))
            # Hosts have been reached a moment ago: what horovodrun remembers of earlier tries is of no use.
            words += ["--network-interfaces", here, "--disable-cache"]
            words += [python, "-m", "hvd_cifar.launch.cluster.guard", "--subnet", network.subnet]
        return words + program

    words = [installed.mpirun, *where]
    words += ["--allow-run-as-root"] if installed.as_root else []
    # As horovodrun does: the threads of Horovod and TensorFlow need all cores, and openib is Open MPI's old InfiniBand.
    words += ["-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    if request.ring:
        words += [word for name, value in RING_PARAMETERS.items() for word in ("-mca", name, value)]
    if "SLURM_JOB_ID" in environ and not request.in_slurm:
        words += ["-mca", "plm", "^slurm", "-mca", "ras", "^slurm"]  # mpirun would look for the hosts among its nodes
    if network is not None:
        words += _of_other_hosts(network, environ)
        if Path(installed.mpirun).parent == bin_folder:
            # The packaged Open MPI looks for itself where it was built, unless both are told.
            words += ["--prefix", str(bin_folder.parent), "-x", "OPAL_PREFIX"]
    return words + program


def _of_other_hosts(network: Network, environ: Mapping[str, str]) -> list[str]:
    """mpirun's options for ranks on other hosts."""
    # Ranks talk over this network, and mpirun with its daemons too: it would take any card that is up.
    words = ["-mca", "btl_tcp_if_include", network.subnet, "-mca", "oob_tcp_if_include", network.subnet]
    # This machine logs in to every host; hosts need no way to log in to each other.
    words += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "plm_rsh_args", " ".join(ssh.OPTIONS)]
    for name, seconds in KEEPALIVE.items():
        words += ["-mca", name, str(seconds)]
    words += ["--tag-output"]
    words += [word for name in sorted(environ) if EXPORTED.fullmatch(name) for word in ("-x", name)]
    if "NCCL_SOCKET_IFNAME" not in environ:
        words += ["-x", f"NCCL_SOCKET_IFNAME=={','.join(network.card_names)}"]  # the second = asks for whole names
    return words


def _start_doctor(request: Request, check: Callable[[list[str]], None]) -> int:
    """Run the doctor, once, here: it starts ranks itself, and has the launcher's options, too."""
    words = list(request.command)
    words += ["--gloo"] if request.gloo else []
    words += ["--allreduce", "ring"] if request.ring else []
    words += ["-np", str(request.ranks)] if request.ranks else []
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)] if request.hosts else []
    check(words)
    words = [sys.executable, "-m", "hvd_cifar", *words]
    if request.dry_run:
        _write(1, f"{shlex.join(words)}\n".encode())
        return 0
    os.execv(words[0], words)


def _launch(request: Request, ranks: int) -> int:
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, **(RING_VARIABLES if request.ring else {})}
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise UserError("mpirun is gone from PATH; load its module again, or run: ./run.sh setup")
    if Path(mpirun).parent == bin_folder:
        env.setdefault("OPAL_PREFIX", str(bin_folder.parent))
    if request.in_slurm:
        env["SLURM_EXPORT_ENV"] = "ALL"  # after sbatch --export=NONE mpirun's daemons would lack PATH and OPAL_PREFIX
    of_ranks = hosts_of_ranks(request.hosts, ranks)
    request = replace(request, hosts=tuple(host for host in request.hosts if host.name in of_ranks))
    network, gpus = _ask_hosts(request, bin_folder)
    if not _is_for_gpus() and not _measures_nothing(request.command):
        _note_unused_gpus(gpus or {socket.gethostname(): _gpus_here()}, all_here=network is None)
    words = command(request, ranks, Installation(sys.executable, mpirun, os.geteuid() == 0), env, network)
    if request.dry_run:
        _write(1, f"{_as_typed(words, env)}\n".encode())
        return 0
    if words[0] == sys.executable:
        os.execve(words[0], words, env)

    cores = _cores_here()
    if ranks > cores and network is None:
        _complain(f"note: {ranks} ranks share {cores} core{'s' * (cores > 1)}: results stay right, speed does not")
    if request.gloo:
        return _run_gloo(words, env, of_ranks if network else [])
    watched = sys.stdout.isatty()
    if watched:
        # Ranks see a terminal of mpirun's making, whatever this one is.
        env |= {"HVD_CIFAR_TERMINAL": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    code = _run_mpi(words, env, of_ranks if network else [])
    if watched and code >= 128:
        _write(1, SHOW_CURSOR + b"\n")  # a rank that was ended could not take its progress bar away
    return code


def _ask_hosts(request: Request, bin_folder: Path) -> tuple[Network | None, dict[str, int]]:
    """What joins the hosts of a job, and each host's GPUs; None and {} where all ranks run here. Raises UserError."""
    names = [host.name for host in request.hosts]
    here = next((name for name in names if is_local(name)), None)
    if all(map(is_local, names)):
        return None, {}
    if not request.gloo and " " in str(bin_folder):
        raise UserError(f"mpirun starts nothing on other hosts from a path with spaces ({bin_folder}); use --gloo")
    # The launcher takes part also where it has no rank.
    everyone = names if here else [socket.gethostname(), *names]
    way = slurm if request.in_slurm and not request.gloo else ssh  # horovodrun itself goes by ssh
    participants = Participants(everyone, here or socket.gethostname(), sys.executable, way)
    network, reports = find_network(participants, request.gloo)
    return network, {name: reports[name].gpus for name in names}


def _as_typed(words: list[str], env: Mapping[str, str]) -> str:
    """A command as one types it in a shell, with the variables that differ from this process's in front."""
    differing = [f"{name}={shlex.quote(value)}" for name, value in env.items() if os.environ.get(name) != value]
    return " ".join([*differing, shlex.join(words)])


def _run_mpi(words: list[str], env: Mapping[str, str], hosts: list[str]) -> int:
    """Run mpirun. `hosts`: of each rank, where they are several, whose ranks are then told apart."""
    lines = NamedLines(hosts)

    def output(stream: BinaryIO) -> None:
        for rank, piece in by_rank(_chunks(stream)):
            if rank in (0, None):
                _write(1, piece)

    def of_mpirun(chunks: Iterable[bytes]) -> Iterator[bytes]:
        for rank, piece in by_rank(chunks):
            if rank is None:
                yield piece
            else:
                _write(2, lines.add(rank, piece))

    def errors(stream: BinaryIO) -> None:
        chunks = _chunks(stream)
        for piece in without_banners(of_mpirun(chunks) if hosts else chunks):
            _write(2, piece)
        _write(2, lines.rest())

    return _run(words, env, output if hosts else None, errors)


def _run_gloo(words: list[str], env: Mapping[str, str], hosts: list[str]) -> int:
    """Run horovodrun. `hosts`: of each rank, where they are several, whose ranks are then told apart."""
    codes: list[int] = []

    def output(stream: BinaryIO) -> None:
        for rank, line in without_tags(stream, codes):
            if not hosts or rank in (0, None):
                _write(1, line)

    def errors(stream: BinaryIO) -> None:
        lines = NamedLines(hosts)
        for rank, line in without_tags(stream, codes):
            _write(2, line if rank is None or not hosts else lines.add(rank, line))
        _write(2, lines.rest())

    code = _run(words, env, output, errors)
    # horovodrun ends with 1 whatever its ranks ended with, but names their codes, the first one first.
    return codes[0] if code == 1 and codes else code


def _run(
    words: list[str],
    env: Mapping[str, str],
    output: Callable[[BinaryIO], None] | None,
    errors: Callable[[BinaryIO], None],
) -> int:
    """Run a launcher to its end, pass signals on to it, and return its exit code, or 128 + the signal.

    `output` and `errors` read its streams and print what the user is to see.
    """
    # A session of its own: Ctrl-C then reaches this process alone, and the launcher once, through it.
    process: subprocess.Popen[Any] = subprocess.Popen(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if output else None,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=signalled_with_parent(signal.SIGTERM),  # no thread runs yet
    )
    caught: list[int] = []

    def forward(number: int, _: object) -> None:
        caught.append(number)
        # A launcher tidies up on these two only, not when its terminal is gone.
        process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, forward)
    # A request for a checkpoint: mpirun passes it on to its ranks, horovodrun over Gloo does not.
    asks = Path(words[0]).name == "mpirun"
    signal.signal(signal.SIGUSR1, (lambda *_: process.send_signal(signal.SIGUSR1)) if asks else signal.SIG_IGN)
    pumps = [threading.Thread(target=errors, args=[process.stderr], daemon=True)]
    if output:
        pumps.append(threading.Thread(target=output, args=[process.stdout], daemon=True))
    for pump in pumps:
        pump.start()
    code = process.wait()
    for pump in pumps:
        pump.join(SECONDS_FOR_LAST_OUTPUT)
    if caught:
        return 128 + caught[0]
    return code if code >= 0 else 128 - code


def _chunks(stream: BinaryIO) -> Iterator[bytes]:
    while chunk := os.read(stream.fileno(), 65536):
        yield chunk


def _write(descriptor: int, data: bytes) -> None:
    # A reader that has gone (`| head`) does not end the job, whose pipe must be kept empty or its ranks would block.
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]


def _complain(message: str) -> None:
    _write(2, f"hvd_cifar: {message}\n".encode())
