"""The command that starts the ranks, mpirun or the Python of a single rank, and its variables."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hvd_cifar.errors import UserError
from hvd_cifar.import_path import OPTIONS as ISOLATED
from hvd_cifar.launch import validators
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.cluster.network import Network, find_network
from hvd_cifar.launch.cluster.program import Participants
from hvd_cifar.launch.here import gpus_here, note_gpus
from hvd_cifar.launch.job import Starter, write
from hvd_cifar.launch.request import Request
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import LAUNCH, prepare_tensorflow
from hvd_cifar.runtime.transport import RING_PARAMETERS, RING_VARIABLES

# The user's variables that mpirun exports to other hosts. Ranks on this host inherit all variables.
EXPORTED = re.compile(
    r"(HVD_CIFAR|HOROVOD|TF|NCCL|UCX)_\w+|PATH|LD_LIBRARY_PATH|PYTHONPATH|COLUMNS|LINES|KERAS_BACKEND"
)
# What carries MPI's messages: TCP and shared memory, not UCX. Open MPI's obsolete InfiniBand, openib, is left out.
TRANSPORT = {"pml": "ob1", "btl": "^openib"}
# mpirun's TCP keepalive (seconds, seconds, tries): it notices a lost host after 30 s, and by default after 8 minutes.
KEEPALIVE = {"oob_tcp_keepalive_time": 10, "oob_tcp_keepalive_intvl": 5, "oob_tcp_keepalive_probes": 4}
# In an elastic job after 5 s, since the other ranks go on without the host.
KEEPALIVE_ELASTIC = {"oob_tcp_keepalive_time": 2, "oob_tcp_keepalive_intvl": 1, "oob_tcp_keepalive_probes": 3}


def _has_domain(host: Host) -> bool:
    """Whether a host other than this one is named with its domain; an address has none."""
    return "." in host.name and not host.name.replace(".", "").isdigit() and not is_local(host.name)


def _is_exported(name: str, value: str) -> bool:
    """Whether mpirun exports a variable. GPUs have other numbers on other hosts, but "none" holds on all."""
    return bool(EXPORTED.fullmatch(name)) or (name == "CUDA_VISIBLE_DEVICES" and devices.hides_all(value))


def command(
    request: Request, ranks: int, mpirun: str, environ: Mapping[str, str], network: Network | None = None
) -> list[str]:
    """The command that starts the ranks, as words.

    Args:
        request: hosts and command; without hosts all ranks run here.
        ranks: their number.
        mpirun: its path.
        environ: this process's variables, of which mpirun exports some to other hosts.
        network: between the hosts; None: all ranks run here.
    """
    # Ranks start in this process's folder. A user's own program imports from where Python finds its modules.
    module = [] if request.is_program else [*ISOLATED, "-m", "hvd_cifar"]
    program = [sys.executable, *module, *request.command[request.is_program :]]
    hosts = request.hosts or (Host("localhost", ranks),)
    if ranks == 1 and network is None:
        return program
    whole_names = network is not None and any(map(_has_domain, hosts))
    # With whole names mpirun knows its own host by none but this.
    names = [socket.gethostname() if whole_names and is_local(host.name) else host.name for host in hosts]
    slots = ",".join(f"{name}:{host.slots}" for name, host in zip(names, hosts, strict=True))
    words = [mpirun, "-np", str(ranks), "-H", slots]
    words += ["--allow-run-as-root"] if os.geteuid() == 0 else []  # mpirun refuses root without it
    # As horovodrun: no binding, since TensorFlow's threads need all cores.
    words += ["-bind-to", "none", "-map-by", "slot"]
    for name, value in TRANSPORT.items():  # a variable of the user's, such as OMPI_MCA_pml=ucx, takes precedence
        words += ["-mca", name, value] if f"OMPI_MCA_{name}" not in environ else []
    if request.settings.allreduce == "ring":
        words += [word for name, value in RING_PARAMETERS.items() for word in ("-mca", name, value)]
    if "SLURM_JOB_ID" in environ and not request.in_slurm:
        words += ["-mca", "plm", "^slurm", "-mca", "ras", "^slurm"]  # else mpirun takes the job's nodes only
    if request.settings.elastic:
        # When a rank is lost, mpirun sends the others SIGTERM and, this many seconds later, SIGKILL. Ranks take SIGTERM
        # alone as a request to stop, for which they would need the lost rank.
        words += ["-mca", "odls_base_sigkill_timeout", "0"]
    if whole_names:
        # By default it logs in to gpu01.cluster as gpu01, and takes gpu01.east and gpu01.west for one host.
        words += ["-mca", "orte_keep_fqdn_hostnames", "1"]
    if network is not None:
        words += _of_other_hosts(network, environ, KEEPALIVE_ELASTIC if request.settings.elastic else KEEPALIVE)
        if (folder := Path(mpirun).parent) == Path(sys.executable).parent:
            # Without both, the packaged Open MPI looks for its files in the folder where it was built.
            words += ["--prefix", str(folder.parent), "-x", "OPAL_PREFIX"]
    return words + program


def _of_other_hosts(network: Network, environ: Mapping[str, str], keepalive: Mapping[str, int]) -> list[str]:
    """mpirun's options for ranks on other hosts."""
    # For ranks (btl) and mpirun's daemons (oob). By default both use every card that is up.
    words = ["-mca", "btl_tcp_if_include", network.subnet, "-mca", "oob_tcp_if_include", network.subnet]
    # mpirun logs in to every host from here, so that hosts need no ssh between each other.
    words += ["-mca", "plm_rsh_no_tree_spawn", "1", "-mca", "plm_rsh_args", " ".join(ssh.OPTIONS)]
    for name, seconds in keepalive.items():
        words += ["-mca", name, str(seconds)]
    words += ["--tag-output"]
    words += [word for name in sorted(environ) if _is_exported(name, environ[name]) for word in ("-x", name)]
    if "NCCL_SOCKET_IFNAME" not in environ:
        # The second = is part of the value: NCCL then takes the names as exact, not as prefixes.
        words += ["-x", f"NCCL_SOCKET_IFNAME=={','.join(network.card_names)}"]
    return words


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
        columns, lines = shutil.get_terminal_size()
        env |= {"HVD_CIFAR_TERMINAL": "1", "COLUMNS": str(columns), "LINES": str(lines)}
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


def leave_terminal(ranks: int, code: int) -> None:
    """Show the cursor again, which a killed rank leaves hidden, with its progress bar."""
    if _is_watched(ranks) and code >= 128:
        write(1, b"\x1b[?25h\n")


def as_typed(starter: Starter) -> str:
    """The command as typed in a shell, with the variables that differ from this process's before it."""
    env = starter.env.items()
    return " ".join([*(f"{k}={shlex.quote(v)}" for k, v in env if os.environ.get(k) != v), shlex.join(starter.words)])
