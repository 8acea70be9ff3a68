"""From one command line to N ranks: `./run.sh [-np N] [-H HOSTS | --hostfile FILE] [--mpi|--gloo] COMMAND [OPTIONS]`.

The command is checked here, once, before any rank starts. One rank runs without a launcher; several run under mpirun,
or with --gloo under horovodrun. Other hosts need an ssh server, and the environment at the same path. In a Slurm
allocation the hosts are its nodes, and Slurm instead of ssh starts mpirun's daemons. `cluster.network` finds the
network between the hosts. The user sees the output of the ranks without the launchers' tags and banners; the exit code
is the job's. This process does not import TensorFlow.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from hvd_cifar import config
from hvd_cifar.errors import RESUME, UserError
from hvd_cifar.launch import preflight
from hvd_cifar.launch.arguments import Parser
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import (
    Host,
    count,
    hosts_of_ranks,
    is_local,
    ranks_by_default,
    read_hostfile,
)
from hvd_cifar.launch.cluster.network import Network, find_network
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.launch.cluster.remarks import ended_by_signal, without_banners, without_tags
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank
from hvd_cifar.launch.elastic import Discover, ElasticRun, Options, script
from hvd_cifar.launch.install.installer import read_record, recorded_options
from hvd_cifar.launch.job import Job, Starter, chunks, complain, write
from hvd_cifar.launch.restarts import FINAL, Failure, failure_of, reason_to_give_up, seconds_before
from hvd_cifar.launch.roster import Sizes, parse_sizes, slots_of
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import STARTS, copies, launched_size
from hvd_cifar.runtime.transport import RING_PARAMETERS, RING_VARIABLES

USAGE = (
    "./run.sh [-np N] [-H HOSTS | --hostfile FILE] [--mpi|--gloo] [--allreduce ring|auto] [--max-restarts N] "
    "[--elastic MIN:MAX [--host-discovery-script FILE] [--elastic-timeout S] [--cool-down FIRST:LONGEST]] "
    "[--dry-run] COMMAND [OPTIONS]"
)
# mpirun exports these of the user's variables to other hosts; ranks on this host inherit all.
EXPORTED = re.compile(r"(HVD_CIFAR|HOROVOD|TF|NCCL)_\w+|PATH|LD_LIBRARY_PATH|PYTHONPATH|COLUMNS")
# TCP keepalive of mpirun (seconds, seconds, tries): a lost host is noticed after 30 s; by default after 8 minutes.
KEEPALIVE = {"oob_tcp_keepalive_time": 10, "oob_tcp_keepalive_intvl": 5, "oob_tcp_keepalive_probes": 4}
# After 5 s, where the others go on without it.
KEEPALIVE_ELASTIC = {"oob_tcp_keepalive_time": 2, "oob_tcp_keepalive_intvl": 1, "oob_tcp_keepalive_probes": 3}
# horovodrun puts the variables that ranks get into command lines, which `ps` shows to all users of a host.
SECRET = re.compile(r"(?i)(?!SSH_AUTH_SOCK$).*(TOKEN|SECRET|PASSW|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH)")
PYTHON = "python"  # the command that runs a user's own program on each rank
SSH_ENDED = 255  # exit code of an ssh that was ended
SHOW_CURSOR = b"\x1b[?25h"
HOSTS_SHOWN = 3


@dataclass(frozen=True)
class Request:
    """The launcher's options, and the command."""

    ranks: int | None
    hosts: tuple[Host, ...]
    gloo: bool
    command: tuple[str, ...]
    dry_run: bool = False
    ring: bool = False
    max_restarts: int = 0
    run_dir: Path = Path()  # of a job that may start again
    of_restarts: tuple[str, ...] = ()  # options that restarts have beside the command's
    elastic: Options | None = None
    discover: Discover | None = None  # of an elastic job: the hosts that there are now
    is_again: bool = False  # an elastic job starts again
    variables: Mapping[str, str] = field(default_factory=dict)  # of the ranks, beside this process's
    in_slurm: bool = False  # the hosts are the nodes of this process's Slurm allocation


def main(argv: list[str], check: Callable[[list[str]], Any]) -> int:
    """Run the job that `argv` describes, and return its exit code.

    `check` returns the settings of the command's own options, and ends the process if they are wrong.
    """
    try:
        request = parse(argv)
        if max(launched_size() or 1, copies(os.environ)) > 1:
            raise UserError("mpirun or srun started run.sh several times; it starts the ranks itself: call it once")
        if request.command[0] == "doctor":
            return _start_doctor(request, check)
        if request.command[0] == PYTHON:
            _check_program(request.command[1:])
            settings = None
        else:
            settings = check(list(request.command))
        if request.max_restarts or request.elastic:
            request = _with_run_dir(request, settings)
        request = with_allocation(request, slurm.allocation(os.environ))
        if request.elastic:
            assert isinstance(settings, config.TrainSettings)
            return _launch_elastic(request, settings)
        ranks = request.ranks or (1 if _measures_nothing(request.command) else _ranks_of(request.hosts))
        if settings is not None and not request.dry_run:
            _check_early(request, ranks, settings)
        return _launch(request, ranks)
    except UserError as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:  # before the ranks started
        return 130


def parse(argv: list[str]) -> Request:
    """Read the launcher's options. The command begins at the first other word; by default it is `train`.

    Raises UserError.
    """
    parser = Parser(USAGE)
    parser.add_argument("-np", "-n", dest="ranks", type=lambda text: count(text, f"-np {text}"))
    parser.add_argument("--mpi", dest="gloo", action="store_false")
    parser.add_argument("--gloo", dest="gloo", action="store_true")
    parser.add_argument("--allreduce", choices=["ring", "auto"])
    parser.add_argument("--max-restarts", type=lambda text: count(text, f"--max-restarts {text}"), default=0)
    parser.add_argument("--elastic", type=parse_sizes)
    parser.add_argument("--host-discovery-script", type=Path)
    parser.add_argument("--elastic-timeout", type=lambda text: count(text, f"--elastic-timeout {text}"), default=600)
    parser.add_argument("--cool-down", type=_cool_down, default=(10.0, 300.0))
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
    ring = found.allreduce == "ring"
    request = Request(found.ranks, found.hosts, found.gloo, command, found.dry_run, ring, found.max_restarts)
    return _with_elastic(request, found)


def _with_elastic(request: Request, found: argparse.Namespace) -> Request:
    """The request with the options of an elastic job, if it is one. Raises UserError."""
    sizes: Sizes | None = found.elastic
    if sizes is None:
        if found.host_discovery_script:
            raise UserError("--host-discovery-script goes with --elastic MIN:MAX")
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
        discover = partial(read_hostfile, found.hostfile)
    options = Options(sizes, request.ranks, found.elastic_timeout, found.cool_down)
    return replace(request, elastic=options, discover=discover)


def _cool_down(text: str) -> tuple[float, float]:
    first, _, longest = text.partition(":")
    what = f"--cool-down {text}: write FIRST:LONGEST seconds, such as 10:300"
    found = float(count(first, what)), float(count(longest, what))
    if found[0] > found[1]:
        raise UserError(f"--cool-down {text}: the first is more than the longest")
    return found


def with_allocation(request: Request, nodes: tuple[Host, ...]) -> Request:
    """The request with the Slurm job's nodes as its hosts, unless it names hosts. `nodes` is () outside of a job.

    Raises UserError where it asks for more ranks than the job has tasks.
    """
    if request.hosts or not nodes:
        return request
    _check_slots(request.ranks, nodes, "task", "this Slurm job; lower it, or give sbatch or salloc --ntasks")
    return replace(request, hosts=nodes, in_slurm=True)


def _check_slots(ranks: int | None, hosts: tuple[Host, ...], kind: str, where: str) -> None:
    slots = sum(host.slots for host in hosts)
    if ranks and hosts and ranks > slots:
        raise UserError(f"-np {ranks} is more than the {slots} {kind}{'s' * (slots != 1)} of {where}")


def _with_run_dir(request: Request, settings: Any) -> Request:
    """The request with a run directory, which its restarts go on in.

    Raises UserError where the command does not train.
    """
    if not isinstance(settings, config.TrainSettings):
        option = "--elastic" if request.elastic else "--max-restarts"
        raise UserError(f"{option} goes with train: nothing else can go on where it was")
    run_dir = settings.run_dir or config.unused_run_dir(settings.model)
    of_run_dir = () if settings.run_dir else ("--run-dir", str(run_dir))
    # A restart goes on with the run that --resume never has begun.
    of_restarts = ("--resume", "auto") if settings.resume == "never" else ()
    return replace(request, command=request.command + of_run_dir, of_restarts=of_restarts, run_dir=run_dir)


def _measures_nothing(words: tuple[str, ...]) -> bool:
    """Whether a command only predicts from two files, for which one rank is enough."""
    return words[:2] == ("benchmark", "predict") and {"--step", "--allreduce"} <= {w.partition("=")[0] for w in words}


def _check_program(words: tuple[str, ...]) -> None:
    """Raise UserError where a user's own program does not exist: Python would say so once for each rank."""
    if not words:
        raise UserError("python: name a program: ./run.sh -np 2 python PROGRAM.py")
    if not words[0].startswith("-") and not Path(words[0]).exists():
        raise UserError(f"python {words[0]}: no such file")


def _ranks_of(hosts: tuple[Host, ...]) -> int:
    """All slots of the named hosts; without any, one rank per GPU that the environment can use, else one per core."""
    if hosts:
        return sum(host.slots for host in hosts)
    return ranks_by_default(_gpus_here() if _is_for_gpus() else 0, _cores_here())


def _check_early(request: Request, ranks: int, settings: Any) -> None:
    """Raise UserError for what is known before any rank starts."""
    of_ranks = hosts_of_ranks(request.hosts, ranks) or ["localhost"] * ranks
    local = {name: is_local(name) for name in dict.fromkeys(of_ranks)}
    sees_files, on_gpus = local[of_ranks[0]], _is_for_gpus()
    preflight.check(settings, ranks, sees_files=sees_files, on_gpus=on_gpus, warn=complain)
    preflight.check_memory(sum(local[name] for name in of_ranks), preflight.available_memory())


def _cores_here() -> int:
    return devices.usable_cores(len(os.sched_getaffinity(0)), devices.cpu_quota())


def _gpus_here() -> int:
    return len(devices.visible_gpus(devices.list_gpus(), os.environ))


def _is_for_gpus() -> bool:
    return recorded_options(read_record()).gpu


def _note_unused_gpus(gpus: Mapping[str, int], all_here: bool) -> None:
    """Say that the environment cannot use the GPUs, whose number `gpus` holds for each host."""
    have = [f"{count} on {host}" for host, count in gpus.items() if count]
    if have:
        more = f" and {len(have) - HOSTS_SHOWN} more hosts" if len(have) > HOSTS_SHOWN else ""
        set_up = f"./run.sh setup --gpu{' --hostfile FILE' * (not all_here)}"
        complain(
            f"note: ranks compute on the CPU, and GPUs stay unused ({', '.join(have[:HOSTS_SHOWN])}{more}): "
            f"the environment is for the CPU; to use them: {set_up}"
        )


@dataclass(frozen=True)
class Installation:
    """The programs that start ranks.

    python: path of every rank's interpreter, the same on every host; horovodrun is in the same folder.
    mpirun: path.
    as_root: whether the user is root, whom mpirun refuses without an option.
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
    """The command that starts the ranks, as words.

    Args:
        request: hosts and command; without hosts all ranks run here.
        ranks: their number.
        installed: the programs that start them.
        environ: this process's variables, some of which are exported to other hosts.
        network: between the hosts; None: all ranks run here.
    """
    # Ranks start in this process's folder, and import from it and from PYTHONPATH, as `python -m` does.
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
            # The hosts have just been reached: horovodrun's cache of earlier ssh checks may be outdated.
            words += ["--network-interfaces", here, "--disable-cache"]
            words += [python, "-m", "hvd_cifar.launch.cluster.guard", "--subnet", network.subnet]
        return words + program

    words = [installed.mpirun, *where]
    words += ["--allow-run-as-root"] if installed.as_root else []
    # As horovodrun does: no binding, since TensorFlow's threads need all cores; no openib, Open MPI's old InfiniBand.
    words += ["-bind-to", "none", "-map-by", "slot", "-mca", "pml", "ob1", "-mca", "btl", "^openib"]
    if request.ring:
        words += [word for name, value in RING_PARAMETERS.items() for word in ("-mca", name, value)]
    if "SLURM_JOB_ID" in environ and not request.in_slurm:
        words += ["-mca", "plm", "^slurm", "-mca", "ras", "^slurm"]  # or mpirun takes only the job's nodes
    if network is not None:
        words += _of_other_hosts(network, environ, KEEPALIVE_ELASTIC if request.elastic else KEEPALIVE)
        if Path(installed.mpirun).parent == bin_folder:
            # The packaged Open MPI looks for its files in the folder of its build, unless both are set.
            words += ["--prefix", str(bin_folder.parent), "-x", "OPAL_PREFIX"]
    return words + program


def _of_other_hosts(network: Network, environ: Mapping[str, str], keepalive: Mapping[str, int]) -> list[str]:
    """mpirun's options for ranks on other hosts."""
    # Ranks use this network, and so does mpirun with its daemons. By default they use every card that is up.
    words = ["-mca", "btl_tcp_if_include", network.subnet, "-mca", "oob_tcp_if_include", network.subnet]
    # This machine logs in to every host: hosts need no ssh between each other.
    words += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "plm_rsh_args", " ".join(ssh.OPTIONS)]
    for name, seconds in keepalive.items():
        words += ["-mca", name, str(seconds)]
    words += ["--tag-output"]
    words += [word for name in sorted(environ) if EXPORTED.fullmatch(name) for word in ("-x", name)]
    if "NCCL_SOCKET_IFNAME" not in environ:
        words += ["-x", f"NCCL_SOCKET_IFNAME=={','.join(network.card_names)}"]  # the second = stands for exact names
    return words


def _start_doctor(request: Request, check: Callable[[list[str]], Any]) -> int:
    """Run the doctor as one process here, with the launcher's options: it starts ranks by itself."""
    words = list(request.command)
    words += ["--gloo"] if request.gloo else []
    words += ["--allreduce", "ring"] if request.ring else []
    words += ["-np", str(request.ranks)] if request.ranks else []
    words += ["-H", ",".join(f"{host.name}:{host.slots}" for host in request.hosts)] if request.hosts else []
    check(words)
    words = [sys.executable, "-m", "hvd_cifar", *words]
    if request.dry_run:
        write(1, f"{shlex.join(words)}\n".encode())
        return 0
    os.execv(words[0], words)


@dataclass(frozen=True)
class Ready:
    """A job that can start.

    words, env: the command that starts its ranks.
    hosts: each rank's host where there are several hosts, else [].
    """

    words: list[str]
    env: dict[str, str]
    hosts: list[str]


def _make_ready(request: Request, ranks: int) -> Ready:
    """Look at the hosts, and make the command. Raises UserError."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, **(RING_VARIABLES if request.ring else {}), **request.variables}
    mpirun = shutil.which("mpirun", path=path)
    if mpirun is None:
        raise UserError("no mpirun on PATH; load its module again, or run: ./run.sh setup")
    if Path(mpirun).parent == bin_folder:
        env.setdefault("OPAL_PREFIX", str(bin_folder.parent))
    if request.in_slurm:
        env["SLURM_EXPORT_ENV"] = "ALL"  # mpirun's daemons need PATH and OPAL_PREFIX, also after sbatch --export=NONE
    if _is_watched(request, ranks):
        # mpirun gives ranks a pseudo-terminal of its own, whatever this process has.
        env |= {"HVD_CIFAR_TERMINAL": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    if not request.dry_run:
        env[STARTS] = ""  # exported to other hosts; its value is Job's
    of_ranks = hosts_of_ranks(request.hosts, ranks)
    request = replace(request, hosts=tuple(host for host in request.hosts if host.name in of_ranks))
    network, gpus = _ask_hosts(request, bin_folder)
    if not _is_for_gpus() and not _measures_nothing(request.command) and not request.is_again:
        _note_unused_gpus(gpus or {socket.gethostname(): _gpus_here()}, all_here=network is None)
    installed = Installation(sys.executable, mpirun, os.geteuid() == 0)
    words = command(request, ranks, installed, env, network)
    if Path(words[0]).name == "horovodrun":
        env = _without_secrets(env)
    return Ready(words, env, of_ranks if network else [])


def _launch(request: Request, ranks: int) -> int:
    ready = _make_ready(request, ranks)
    if request.dry_run:
        write(1, f"{_as_typed(ready.words, ready.env)}\n".encode())
        return 0
    if ready.words[0] == sys.executable and not request.max_restarts:
        os.execve(ready.words[0], ready.words, ready.env)

    cores = _cores_here()
    if ranks > cores and not ready.hosts:
        complain(f"note: {ranks} ranks share {cores} core{'s' * (cores > 1)}: results are right, but slow")
    job = Job(can_stop=request.command[0] == "train")
    code = _start(ready, job)
    if request.max_restarts:
        ready = replace(ready, words=[*ready.words, *request.of_restarts])
        code = _restart(code, request, job, lambda: _start(ready, job))
    _leave_terminal(request, ranks, code)
    return code


def _without_secrets(env: Mapping[str, str]) -> dict[str, str]:
    """The variables whose names do not look like those of secrets; the others are told by name."""
    secrets = [name for name in sorted(env) if SECRET.match(name)]
    if secrets:
        complain(
            f"note: horovodrun shows variables to other users; ranks do not get {', '.join(secrets)}; --mpi hides them"
        )
    return {name: value for name, value in env.items() if name not in secrets}


def _launch_elastic(request: Request, settings: config.TrainSettings) -> int:
    """Run an elastic job; see `launch.elastic`."""
    assert request.elastic
    sizes = replace(request.elastic.sizes, shards=settings.virtual_shards)
    if sizes.fitting(sizes.most) < sizes.least:
        raise UserError(
            f"--elastic {sizes.least}:{sizes.most}: no number in between divides --virtual-shards {sizes.shards}"
        )
    hosts = request.hosts or (Host("localhost", sizes.most),)
    ranks = request.ranks or sizes.fitting(slots_of(hosts))
    if request.dry_run:
        return _launch(replace(request, ranks=ranks), ranks)
    if request.hosts or not request.discover:
        _check_early(request, ranks, settings)
    job = Job(can_stop=True)
    starts = itertools.count()

    def start(chosen: tuple[Host, ...], variables: Mapping[str, str]) -> int:
        is_again = next(starts) > 0
        words = request.command + (request.of_restarts if is_again else ())
        given = None if chosen[0].name == "localhost" else chosen
        now = replace(request, hosts=given or (), command=words, variables=variables, is_again=is_again)
        return _start(_make_ready(now, slots_of(chosen)), job)

    run = ElasticRun(
        replace(request.elastic, sizes=sizes), request.discover or (lambda: hosts), start, job, request.run_dir
    )
    way = slurm if request.in_slurm and not request.gloo else ssh
    try:
        code = run.run()
    finally:
        run.clean_up({host for host in run.used if not is_local(host)}, way.words)
    _leave_terminal(request, 2, code)
    return code


def _is_watched(request: Request, ranks: int) -> bool:
    """Whether a person watches mpirun's output."""
    return sys.stdout.isatty() and not request.gloo and ranks > 1


def _leave_terminal(request: Request, ranks: int, code: int) -> None:
    if _is_watched(request, ranks) and code >= 128:
        write(1, SHOW_CURSOR + b"\n")  # a killed rank leaves its progress bar and a hidden cursor


def _restart(code: int, request: Request, job: Job, start: Callable[[], int]) -> int:
    """Start a failed job again until it ends otherwise or is given up, and return its exit code."""
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
    """The network between the hosts, and each host's number of GPUs; None and {} where all ranks run here.

    Raises UserError.
    """
    names = [host.name for host in request.hosts]
    here = next((name for name in names if is_local(name)), None)
    if all(map(is_local, names)):
        return None, {}
    if not request.gloo and " " in str(bin_folder):
        raise UserError(f"mpirun starts nothing on other hosts from a path with spaces ({bin_folder}); use --gloo")
    # This machine takes part even if it has no rank.
    everyone = names if here else [socket.gethostname(), *names]
    way = slurm if request.in_slurm and not request.gloo else ssh  # horovodrun always uses ssh
    participants = Participants(everyone, here or socket.gethostname(), sys.executable, way)
    network, reports = find_network(participants, request.gloo)
    return network, {name: reports[name].gpus for name in names}


def _as_typed(words: list[str], env: Mapping[str, str]) -> str:
    """The command as typed in a shell, after the variables that differ from this process's."""
    differing = [f"{name}={shlex.quote(value)}" for name, value in env.items() if os.environ.get(name) != value]
    return " ".join([*differing, shlex.join(words)])


def _mpirun(words: list[str], env: Mapping[str, str], hosts: list[str], job: Job) -> Starter:
    """mpirun. `hosts`: each rank's host where there are several hosts, else []; see `NamedLines`."""
    lines = NamedLines(hosts)

    def output(stream: BinaryIO) -> None:
        for rank, piece in by_rank(chunks(stream)):
            if rank in (0, None):
                write(1, piece)

    def of_mpirun(pieces: Iterable[bytes]) -> Iterator[bytes]:
        for rank, piece in by_rank(pieces):
            if rank is None:
                yield piece
            else:
                job.pass_on(lines.add(rank, piece))

    def errors(stream: BinaryIO) -> None:
        for piece in without_banners(of_mpirun(chunks(stream)) if hosts else chunks(stream)):
            job.pass_on(piece)
        job.pass_on(lines.rest())

    return Starter(words, env, output if hosts else None, errors)


def _horovodrun(
    words: list[str], env: Mapping[str, str], hosts: list[str], job: Job, codes: list[tuple[int, int]]
) -> Starter:
    """horovodrun over Gloo. `hosts`: as for `_mpirun`; `codes`: of `without_tags`."""

    def output(stream: BinaryIO) -> None:
        for rank, line in without_tags(stream, codes):
            if not hosts or rank in (0, None):
                write(1, line)

    def errors(stream: BinaryIO) -> None:
        lines = NamedLines(hosts)
        for rank, line in without_tags(stream, codes):
            job.pass_on(line if rank is None or not hosts else lines.add(rank, line))
        job.pass_on(lines.rest())

    return Starter(words, env, output, errors)


def _python(words: list[str], env: Mapping[str, str], job: Job) -> Starter:
    """A single rank, whose stdout is this process's."""

    def errors(stream: BinaryIO) -> None:
        for piece in chunks(stream):
            job.pass_on(piece)

    return Starter(words, env, None, errors)


def _start(ready: Ready, job: Job) -> int:
    """Run the program that starts the ranks, and return the job's exit code."""
    words, env, hosts = ready.words, ready.env, ready.hosts
    name = Path(words[0]).name
    if name == "mpirun":
        return job.run(_mpirun(words, env, hosts, job))
    if name != "horovodrun":
        return job.run(_python(words, env, job))
    codes: list[tuple[int, int]] = []
    code = job.run(_horovodrun(words, env, hosts, job, codes))
    if codes and code == 1:
        # horovodrun's exit code is 1 for every failure of a rank, but it prints the ranks' codes in their order.
        rank, code = codes[0]
        if number := signal_of(code):
            host = hosts[rank] if hosts else socket.gethostname()
            job.pass_on(ended_by_signal(rank, host, number, signal.strsignal(number) or "").encode())
    # Without a rank on this host a request to stop ends the ssh sessions, and their guards stop the ranks.
    return RESUME if job.stops and code == SSH_ENDED else code


def signal_of(code: int) -> int:
    """The signal that an exit code stands for, as Python or a shell gives it; 0: none."""
    return -code if code < 0 else code - 128 if 128 < code < 160 else 0
