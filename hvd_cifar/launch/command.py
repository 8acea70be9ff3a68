"""What is to be started, and the command that starts it: mpirun, or a single rank that needs no launcher."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local, parse_hosts, ranks_by_default, read_hostfile
from hvd_cifar.launch.cluster.network import Network, Participants, find_network
from hvd_cifar.launch.job import Starter
from hvd_cifar.launch.settings import HostSettings, LaunchSettings, launcher_options
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import LAUNCH, RING_PARAMETERS, RING_VARIABLES, prepare_tensorflow

PYTHON = "python"  # the command that runs a user's own program on each rank
# The user's variables that mpirun exports to other hosts. Ranks on this host inherit all variables.
EXPORTED = re.compile(r"(HVD_CIFAR|HOROVOD|TF|NCCL|UCX)_\w+|PATH|LD_LIBRARY_PATH|PYTHONPATH|KERAS_BACKEND")
# What carries MPI's messages: TCP and shared memory, not UCX. Open MPI's obsolete InfiniBand, openib, is left out.
TRANSPORT = {"pml": "ob1", "btl": "^openib"}
# mpirun's TCP keepalive (seconds, seconds, tries): it notices a lost host after 30 s, and by default after 8 minutes;
# in an elastic job after 5 s, since the other ranks go on without the host.
KEEPALIVE, KEEPALIVE_ELASTIC = (10, 5, 4), (2, 1, 3)


@dataclass(frozen=True)
class Request:
    """What is to be started."""

    settings: LaunchSettings
    command: tuple[str, ...]
    ranks: int | None  # -np; None: it is not given
    hosts: tuple[Host, ...] = ()  # (): this machine
    in_slurm: bool = False  # whether the hosts are the nodes of this Slurm allocation, which starts programs there
    run_dir: Path = Path()  # set where restarts, elastic and validation ranks need it, and where rank 0 trains here
    variables: Mapping[str, str] = field(default_factory=dict)  # additional ones for the ranks

    @property
    def is_program(self) -> bool:
        """Whether the command is a program of the user's own."""
        return self.command[0] == PYTHON


def parse(argv: list[str]) -> Request:
    """The request of a command line. The command is `train` by default. Raises UserError."""
    settings, words = launcher_options(argv)
    command = words or ("train",)
    if command[0] == "python3":
        command = (PYTHON, *command[1:])
    command = (PYTHON, *command) if command[0].endswith(".py") else command
    return Request(settings, command, settings.ranks, named_hosts(settings))


def named_hosts(given: HostSettings) -> tuple[Host, ...]:
    """The hosts that the user names; (): none. Raises UserError."""
    hosts: tuple[Host, ...] = ()
    if given.hosts is not None:
        hosts = parse_hosts(given.hosts)
    elif given.hostfile is not None:
        hosts = read_hostfile(given.hostfile)
    check_slots(given.ranks, hosts)
    return hosts


def with_allocation(request: Request, nodes: tuple[Host, ...]) -> Request:
    """The request on the nodes of a Slurm job. UserError where it asks for more ranks than the job has tasks."""
    ranks = request.ranks
    here = f", or -H localhost:{ranks}" if len(nodes) == 1 and is_local(nodes[0].name) else ""
    check_slots(ranks, nodes, "task", f"this Slurm job; lower it, or give sbatch or salloc --ntasks={ranks}{here}")
    return replace(request, hosts=nodes, in_slurm=shutil.which("srun") is not None)


def check_slots(
    ranks: int | None, hosts: tuple[Host, ...], kind: str = "slot", where: str = "the hosts; lower it or add slots"
) -> None:
    """Raise UserError where there are hosts, and fewer slots on them than ranks."""
    slots = slots_of(hosts)
    if ranks and hosts and ranks > slots:
        raise UserError(f"-np {ranks} is more than the {slots} {kind}{'s' * (slots != 1)} of {where}")


def slots_of(hosts: Sequence[Host]) -> int:
    """The number of slots of all hosts."""
    return sum(host.slots for host in hosts)


def first_slots(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """The first `ranks` slots of the hosts."""
    used = Counter(hosts_of_ranks(hosts, ranks)) if hosts else {}
    return tuple(Host(name, slots) for name, slots in used.items())


def ranks_of(hosts: Sequence[Host]) -> int:
    """All slots of the hosts. Without hosts, one rank per GPU that the environment can use, else one per core."""
    return slots_of(hosts) or ranks_by_default(gpus_here() if is_for_gpus() else 0, cores_here())


def cores_here() -> int:
    """The cores of this machine that ranks may use."""
    return devices.usable_cores(len(os.sched_getaffinity(0)), devices.cpu_quota())


def gpus_here() -> int:
    """The GPUs of this machine that ranks see."""
    return len(devices.visible_gpus(devices.list_gpus(), os.environ))


def is_for_gpus() -> bool:
    """Whether the environment is for GPUs: its Horovod is (launch/install/horovod.py)."""
    return "+gpu." in version("horovod")


def notes(settings: Any, hosts: Sequence[Host] = ()) -> Iterator[str]:
    """What a user should know: a slow precision; where ranks run here, GPUs that stay unused, or are not there."""
    has_ranks, for_gpus = not hosts or any(is_local(host.name) for host in hosts), is_for_gpus()
    count = gpus_here() if has_ranks else 0
    if has_ranks and for_gpus and not count and not devices.hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")):
        yield "note: ranks compute on the CPU: nvidia-smi lists no GPU here; is the driver loaded?"
    if count and not for_gpus:
        yield f"note: ranks compute on the CPU, and {count} GPUs stay unused; to use them: ./run.sh setup --gpu"
    if getattr(settings, "precision", None) == "mixed_float16" and not for_gpus:
        yield "note: --precision mixed_float16 is slow on a CPU; for speed give mixed_bfloat16 or float32"


def command(request: Request, mpirun: str, environ: Mapping[str, str], network: Network | None = None) -> list[str]:
    """The command that starts the ranks, as words.

    `mpirun`: its path. `environ`: variables, of which mpirun exports some to other hosts. `network`: between the hosts;
    None: all ranks run here.
    """
    # Ranks start in this process's folder. A user's own program imports from where Python finds its modules.
    module = [] if request.is_program else [*ISOLATED, "-m", "hvd_cifar"]
    program = [sys.executable, *module, *request.command[request.is_program :]]
    if request.ranks == 1 and network is None and request.command[0] != "train" and not request.settings.max_restarts:
        return program
    hosts = request.hosts or (Host("localhost", request.ranks or 1),)
    # mpirun, which keeps whole names, knows its own host by this one only.
    names = [socket.gethostname() if network and is_local(host.name) else host.name for host in hosts]
    slots = ",".join(f"{name}:{host.slots}" for name, host in zip(names, hosts, strict=True))
    words = [mpirun, "-np", str(request.ranks), "-H", slots, "--tag-output"]
    words += ["--allow-run-as-root"] if os.geteuid() == 0 else []  # mpirun refuses root without it
    # As horovodrun: no binding, since TensorFlow's threads need all cores.
    words += ["-bind-to", "none", "-map-by", "slot"]

    def unless_set(parameters: Mapping[str, str]) -> dict[str, str]:
        """Variables of the user's, such as OMPI_MCA_pml=ucx, take precedence."""
        return {name: value for name, value in parameters.items() if f"OMPI_MCA_{name}" not in environ}

    parameters = unless_set(TRANSPORT)
    if request.settings.allreduce == "ring":
        parameters |= RING_PARAMETERS
    if "SLURM_JOB_ID" in environ and not request.in_slurm:
        parameters |= {"plm": "^slurm", "ras": "^slurm"}  # else mpirun takes the job's nodes only
    if request.settings.elastic:
        # When a rank is lost, mpirun sends the others SIGTERM and, this many seconds later, SIGKILL. Ranks take SIGTERM
        # alone as a request to stop, for which they would need the lost rank.
        parameters["odls_base_sigkill_timeout"] = "0"
    if network is not None:
        keepalive = KEEPALIVE_ELASTIC if request.settings.elastic else KEEPALIVE
        parameters |= unless_set(_of_other_hosts(network, keepalive))
        words += [word for name in sorted(environ) if _is_exported(name, environ[name]) for word in ("-x", name)]
        if "NCCL_SOCKET_IFNAME" not in environ:
            # The second = is part of the value: NCCL then takes the names as exact, not as prefixes.
            words += ["-x", f"NCCL_SOCKET_IFNAME=={','.join(network.card_names)}"]
        if (folder := Path(mpirun).parent) == Path(sys.executable).parent:
            # Without both, the packaged Open MPI looks for its files in the folder where it was built.
            words += ["--prefix", str(folder.parent), "-x", "OPAL_PREFIX"]
    return words + [word for name, value in parameters.items() for word in ("-mca", name, value)] + program


def _of_other_hosts(network: Network, keepalive: tuple[int, int, int]) -> dict[str, str]:
    """mpirun's parameters for ranks on other hosts."""
    seconds, interval, probes = map(str, keepalive)
    return {
        # For ranks (btl) and mpirun's daemons (oob). By default both use every card that is up.
        "btl_tcp_if_include": network.subnet,
        "oob_tcp_if_include": network.subnet,
        # mpirun logs in to every host from here, so that hosts need no ssh between each other.
        "plm_rsh_no_tree_spawn": "1",
        "plm_rsh_args": " ".join(ssh.OPTIONS),
        # By default it logs in to gpu01.cluster as gpu01, and takes gpu01.east and gpu01.west for one host.
        "orte_keep_fqdn_hostnames": "1",
        "oob_tcp_keepalive_time": seconds,
        "oob_tcp_keepalive_intvl": interval,
        "oob_tcp_keepalive_probes": probes,
    }


def _is_exported(name: str, value: str) -> bool:
    """Whether mpirun exports a variable. GPUs have other numbers on other hosts, but "none" holds on all."""
    return bool(EXPORTED.fullmatch(name)) or (name == "CUDA_VISIBLE_DEVICES" and devices.hides_all(value))


def make_starter(request: Request) -> Starter:
    """Find the network between the hosts, and make the command that starts the ranks. Raises UserError."""
    bin_folder = Path(sys.executable).parent
    path = os.pathsep.join([str(bin_folder), os.environ.get("PATH", os.defpath)])
    env = {**os.environ, "PATH": path, **request.variables}
    if request.settings.allreduce == "ring":
        env |= RING_VARIABLES
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
    if not request.settings.dry_run:
        env[LAUNCH] = ""  # so that mpirun exports it; `Job` sets its value
    of_ranks = hosts_of_ranks(request.hosts, request.ranks or 1)
    request = replace(request, hosts=tuple(host for host in request.hosts if host.name in of_ranks))
    network = _network_of(request, bin_folder)
    proof = request.run_dir / "summary.json" if request.run_dir != Path() and is_local(of_ranks[0]) else None
    return Starter(command(request, mpirun, env, network), env, of_ranks if network else [], proof)


def _network_of(request: Request, bin_folder: Path) -> Network | None:
    """The network between the hosts; None where all ranks run here. Raises UserError."""
    names = [host.name for host in request.hosts]
    here = next((name for name in names if is_local(name)), None)
    if all(map(is_local, names)):
        return None
    if " " in str(bin_folder):
        raise UserError(f"mpirun starts nothing on other hosts from a path with spaces: move {bin_folder.parents[1]}")
    # This machine takes part even without ranks: it starts them.
    everyone = names if here else [socket.gethostname(), *names]
    return find_network(Participants(everyone, here or socket.gethostname(), slurm if request.in_slurm else ssh))


def as_typed(starter: Starter) -> str:
    """The command as typed in a shell, with the variables that differ from this process's before it."""
    env = starter.env.items()
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in env if os.environ.get(k) != v), shlex.join(starter.words)])
