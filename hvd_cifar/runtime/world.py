"""A rank's start (Horovod, its device, its threads) and its end, of its own or because another rank is lost."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.common.exceptions import HorovodInternalError

from hvd_cifar.errors import Preempted, TrainingError, UserError, cause_of
from hvd_cifar.files import complain
from hvd_cifar.runtime import devices, environment
from hvd_cifar.runtime.ranks import RankFacts, gather
from hvd_cifar.runtime.watch import Watch

GRACE_SECONDS = 2.0  # where all ranks leave, rank 0 speaks for all, and its end ends the others
# A rank that ends shuts Horovod down, and only then its process ends: the launcher must see that end first, to name it.
SECONDS_FOR_FIRST = 10.0
# A rank that ends, for any reason, shuts Horovod down for all ranks (SHUT_DOWN_ERROR in common.h of Horovod 0.28.1).
# Over Gloo a broken connection raises an error of Gloo's transport (gloo/transport/tcp/pair.cc).
# Over MPI a broken connection raises no error here: MPI ends the process.
LOSSES = (r"(Horovod has been shut down)\.", r"gloo/transport/[^\]\n]*\] ([^\n]+?)(?: \[Op:|$)")


@dataclass(frozen=True)
class World:
    """A rank's place in the job, its device and its communication."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    first: int  # of the ranks of this host, whose names may repeat
    host: str
    device: str  # "/GPU:0" or "/CPU:0": TensorFlow's name of the one device that this rank sees
    threads: int  # of TensorFlow's pool; 0: TensorFlow's own choice, on a GPU
    controller: str  # mpi or gloo: what Horovod communicates over
    algorithm: str = ""  # of the all-reduce, see `environment.all_reduce`
    network: str = ""  # of MPI's messages between hosts, where the launcher has chosen it
    elastic: environment.ElasticJob | None = None
    beside: environment.Beside | None = None  # ranks of the other job, where one trains and the other one validates
    ranks: tuple[RankFacts, ...] = ()  # by rank, in a `session`

    @property
    def batch_ranks(self) -> int:
        """The number of ranks that multiplies --batch-size: in an elastic job -np, or that of the first start."""
        return self.elastic.ranks if self.elastic else self.size

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    def describe(self) -> str:
        """One line for the log: ranks, devices, controller."""
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        kind = "one GPU each" if "GPU" in self.device else f"{self.threads} CPU thread{'s' * (self.threads > 1)} each"
        network = f"; TCP {self.network}" if self.network else ""
        how = f" ({self.algorithm}{network})" if self.size > 1 and self.algorithm else ""
        return f"{ranks}, {kind}, all-reduce over {self.controller}{how}"


_running: tuple[World, bool] | None = None  # this process's world, and whether TensorFlow is deterministic


def start(threads: int | None = None, deterministic: bool = False) -> World:
    """Start Horovod in this process, pin its device and size its thread pool, before any TensorFlow operation.

    A second call returns the running world: MPI starts once in a process, and TensorFlow keeps its devices and threads.
    Raises UserError where GPUs or TensorFlow's state do not fit, or MPI did not join the ranks.

    Args:
        threads: of TensorFlow's pools on a CPU; None: this rank's share of the host's cores.
        deterministic: TensorFlow uses operations that give the same bits every time.
    """
    global _running
    if _running is None:
        _running = _start(threads, deterministic), deterministic
        return _running[0]
    world, is_deterministic = _running
    if not hvd.is_initialized():
        raise UserError("hvd.shutdown() was called in this process, and MPI cannot start twice: remove the call")
    if threads and world.threads not in (0, threads):
        raise UserError(
            f"--threads-per-rank {threads}: TensorFlow runs with {world.threads} since the first run of this process;"
            " give both runs the same number, or start another process"
        )
    if deterministic and not is_deterministic:
        raise UserError(
            "--deterministic: TensorFlow runs without it since the first run of this process; give it to the first"
            " run also, or start another process"
        )
    return world


class _Sight(NamedTuple):
    """What a rank sees of its host: GPUs by name, GPUs that nvidia-smi lists and TensorFlow does not find, and CPUs."""

    host: str
    gpus: list[str]
    unseen: int
    cpus: frozenset[int]


def _start(threads: int | None, deterministic: bool) -> World:
    environment.check_launcher()
    gpus = tf.config.list_physical_devices("GPU")
    environment.prepare_mpi(os.environ, on_cpu=not gpus)
    hvd.init()
    _check_size()
    local_rank, local_size = hvd.local_rank(), hvd.local_size()

    listed = devices.visible_gpus(devices.list_gpus(), os.environ) if gpus or hvd.nccl_built() else []
    unseen = len(listed) if listed and not gpus else 0
    if len(listed) != len(gpus):
        # nvidia-smi fails or counts other GPUs: the scheduler's variable for this process identifies its GPUs.
        listed = [f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'all')} {gpu.name}" for gpu in gpus]
    first, hosts, here = _look_around(_Sight(socket.gethostname(), listed, unseen, frozenset(os.sched_getaffinity(0))))
    # Ranks of another job on this host have GPUs and cores of their own.
    beside = environment.beside()
    before = beside.before if beside and here == 0 else 0
    if beside:
        hosts[0] = hosts[0][:1] * beside.before + hosts[0]
        hosts[-1] = hosts[-1] + hosts[-1][:1] * beside.after

    if deterministic:
        tf.config.experimental.enable_op_determinism()
    choice = _choose(hosts)[here][before + local_rank]
    try:
        if choice is not None:
            tf.config.set_visible_devices(gpus[choice], "GPU")
            tf.config.experimental.set_memory_growth(gpus[choice], True)
            threads = 0
        else:
            masks = [sight.cpus for sight in hosts[here]]
            threads = threads or devices.threads_per_rank(masks, before + local_rank, devices.cpu_quota())
            tf.config.threading.set_intra_op_parallelism_threads(threads)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:  # TensorFlow has initialised its devices
        raise UserError(
            "TensorFlow has computed in this process before Horovod started, and keeps its devices and threads: "
            "start Horovod first, then make tensors, models and data sets"
        ) from None
    controller = "mpi" if hvd.mpi_enabled() else "gloo"
    by_nccl = choice is not None and bool(hvd.nccl_built())
    two_levels = hvd.is_homogeneous() and 1 < local_size < hvd.size()
    return World(
        rank=hvd.rank(),
        size=hvd.size(),
        local_rank=local_rank,
        local_size=local_size,
        first=first,
        host=socket.gethostname(),
        device="/CPU:0" if choice is None else "/GPU:0",
        threads=threads,
        controller=controller,
        algorithm=environment.all_reduce(controller, by_nccl, os.environ, hvd.cross_size(), two_levels),
        network=environment.tcp_network(os.environ, by_nccl, hvd.cross_size()),
        elastic=environment.elastic_job(),
        beside=beside,
    )


def _look_around(own: _Sight) -> tuple[int, list[list[_Sight]], int]:
    """The first rank of this host; what the ranks of each host see, by host and local rank; the number of this host.

    Horovod's own operations would initialise TensorFlow, which then keeps its devices and threads. Under Gloo there is
    no other channel, so this rank's own view stands for all of this host: horovodrun starts them in the same way.
    """
    if not hvd.mpi_enabled():
        return hvd.rank() - hvd.local_rank(), [[own] * hvd.local_size()], 0
    MPI = mpi()
    ranks = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED, key=hvd.rank())
    first = ranks.bcast(hvd.rank())
    ranks.Free()
    hosts: dict[int, list[_Sight]] = {}
    for at, sight in MPI.COMM_WORLD.allgather((first, own)):
        hosts.setdefault(at, []).append(sight)
    return first, list(hosts.values()), list(hosts).index(first)


def mpi() -> Any:
    """mpi4py's module MPI. Only after Horovod has started over MPI: under Gloo its import would try to start MPI."""
    import mpi4py

    mpi4py.rc.initialize = False  # Horovod has started MPI, and Horovod ends it
    mpi4py.rc.finalize = False
    from mpi4py import MPI

    return MPI


def _choose(hosts: Sequence[Sequence[_Sight]]) -> list[list[int | None]]:
    """Each rank's GPU, by host and local rank. Where one gets none, every rank that knows of it raises its error."""
    chosen = []
    for ranks in hosts:
        try:
            chosen.append([devices.choose_gpu([s.gpus for s in ranks], local_rank) for local_rank in range(len(ranks))])
            if unseen := max(sight.unseen for sight in ranks):
                raise UserError(
                    f"nvidia-smi lists {unseen} GPU{'s' * (unseen > 1)}, but TensorFlow finds none: see which library "
                    "it cannot open (python -m hvd_cifar.runtime.check_build --gpu), or train on the CPU"
                    " (CUDA_VISIBLE_DEVICES=)"
                )
        except UserError as failure:
            error = UserError(f"{ranks[0].host}: {failure}")
            error.of_one_rank = not hvd.mpi_enabled()
            raise error from None
    return chosen


def _check_size() -> None:
    """Raise UserError where MPI joined fewer ranks than the launcher started: each would train alone."""
    started = environment.launched_size() or 1
    if hvd.mpi_enabled() and hvd.size() < started:
        raise UserError(
            f"the launcher started {started} ranks, but MPI joined {hvd.size()}: use the mpirun of this environment,"
            " or ./run.sh"
        )


@contextlib.contextmanager
def session(threads: int | None = None, deterministic: bool = False, watch: Watch | None = None) -> Iterator[World]:
    """Start this rank as `start` does, report the loss of another rank in one line, and end when all ranks do.

    A process may have several sessions, one after the other; then every rank has the same number of them. Raises
    TrainingError where another rank ended, or a user's code ends this one (SystemExit). `watch`: the rank's watchdog,
    made before; it knows those of the other ranks then.
    """
    world = start(threads, deterministic)
    stopped: Preempted | None = None
    try:
        try:
            yield replace(world, ranks=gather(world, watch or Watch(0)))
        except Preempted as asked:  # on every rank
            stopped = asked
        except SystemExit as left:
            if type(left) is not SystemExit:  # this package's own
                raise
            _leave(world.rank, left, alone=world.size == 1)
        # A rank whose process ends shuts Horovod down for all: every rank waits here for the last one.
        if world.size > 1:
            hvd.allreduce(tf.zeros(1), op=hvd.Sum)
    except Exception as failure:
        said = lost_rank(failure)
        if said is None:
            raise
        if world.controller == "mpi":  # horovodrun names no rank, and ends this one sooner
            time.sleep(SECONDS_FOR_FIRST)
        raise TrainingError(
            f"rank {world.rank} lost another rank, which ended first; see that one's error ({said})"
        ) from failure
    if stopped is not None:
        raise stopped


def _leave(rank: int, left: SystemExit, alone: bool) -> NoReturn:
    """End this process, and so the job, where the user's code left a run by `sys.exit`, with its code; 1 instead of 0.

    A rank that is alone raises it as a TrainingError: a program may go on.
    """
    code = left.code if isinstance(left.code, int) and 0 < left.code < 256 else 1
    told = f"rank {rank} ended first, with exit code {code}: {cause_of(left)}"
    if alone:
        error = TrainingError(told)
        error.code = code
        raise error from left
    if rank:
        time.sleep(GRACE_SECONDS)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    complain(told)
    os._exit(code)  # Horovod's end in this process would first end the other ranks, with exit codes of their own


def lost_rank(failure: BaseException) -> str | None:
    """Horovod's words for the loss of another rank, which has no type or code; None for any other failure."""
    if not isinstance(failure, (tf.errors.UnknownError, HorovodInternalError)):
        return None
    found = (re.search(pattern, str(failure), re.MULTILINE) for pattern in LOSSES)
    return next((match[1] for match in found if match), None)


def versions() -> dict[str, str]:
    """Versions of the software that a run computes with, by package name."""
    import horovod
    import keras
    import numpy

    modules = {"tensorflow": tf, "keras": keras, "numpy": numpy, "horovod": horovod}
    found = {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}
    if hvd.mpi_enabled():
        name, numbers = mpi().get_vendor()
        found["mpi"] = f"{name} {'.'.join(map(str, numbers))}"
    return found
