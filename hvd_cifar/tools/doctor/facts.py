"""Facts about the hosts, from which findings are drawn; they are also part of the doctor's JSON.

Sizes are in bytes, times in seconds. A group of facts that a host did not give is None.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from hvd_cifar.config import DatasetName
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Network, NoWay
from hvd_cifar.runtime import devices


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True)


class HorovodBuild(_Facts):
    """Horovod's build: for which TensorFlow, and with which of MPI, Gloo and NCCL."""

    tensorflow: str
    features: tuple[str, ...]


class Versions(_Facts):
    """Versions of what a rank runs on the host."""

    python: str
    packages: Mapping[str, str]
    mpi: str  # the first line of mpirun --version
    horovod: HorovodBuild | None
    code: str  # digest of this project's files; "": no files


class Cpu(_Facts):
    """The processor.

    cores: in a process's CPU mask; quota: of its control groups, in cores; load: load average of the last minute.
    """

    cores: int
    quota: float | None
    load: float
    model: str
    flags: tuple[str, ...]

    @property
    def usable(self) -> int:
        """Cores for ranks."""
        return devices.usable_cores(self.cores, self.quota)

    @field_validator("quota", mode="before")
    @classmethod
    def _of_files(cls, quota: Any) -> Any:
        """The probe sends the texts of `devices.QUOTA_FILES` in each control group."""
        return devices.least_quota(quota) if isinstance(quota, list) else quota


class Gpu(_Facts):
    """A GPU as nvidia-smi lists it."""

    name: str
    driver: str


class Memory(_Facts):
    """Memory, shared memory, and the limit of open files."""

    available: int
    shm_total: int
    shm_free: int
    attach_error: str  # why a process cannot read another one's memory; "": it can
    open_files: int  # the soft limit; -1: no limit


class Card(_Facts):
    """A network card with an IPv4 address; `speed` in Mbit/s, 0: unknown."""

    name: str
    address: str
    netmask: str
    up: bool
    speed: int

    @property
    def subnet(self) -> str:
        """The subnet, such as 10.0.0.0/24."""
        return str(ipaddress.ip_network(f"{self.address}/{self.netmask}", strict=False))


class Names(_Facts):
    """The host's name and cards, and how it resolves names and addresses."""

    hostname: str
    cards: tuple[Card, ...]
    addresses: Mapping[str, tuple[str, ...]]  # by name, of all hosts and its own
    names: Mapping[str, str]  # by address; "": no name


class Disk(_Facts):
    """The run's folder, or the nearest existing one above it; and the folder for temporary files."""

    folder: str
    free: int
    error: str  # why it is not writable; "": it is
    temporary: str
    temporary_error: str


class DataFile(_Facts):
    """A file of the data set; `wrong_label_at`: the first record with an invalid label; -1: none."""

    bytes: int
    sha256: str
    wrong_label_at: int


class Data(_Facts):
    """The data set on a host."""

    folder: str
    files: Mapping[str, DataFile]


class HostFacts(_Facts):
    """All facts of one host.

    clock: the difference to this machine's clock, positive where it is ahead, and the error of that difference.
    missing: for each group that is None, the reason.
    """

    clock: tuple[float, float] | None = None
    network: Names | None = None
    cpu: Cpu | None = None
    memory: Memory | None = None
    versions: Versions | None = None
    gpus: tuple[Gpu, ...] | None = None
    disk: Disk | None = None
    data: Data | None = None
    missing: Mapping[str, str] = {}


GROUPS = ("network", "cpu", "memory", "versions", "gpus", "disk", "data")


class Link(_Facts):
    """An all-reduce between two hosts, or between two ranks of one host (then `b` is `a`)."""

    a: str
    b: str
    ranks: tuple[int, int]
    seconds: float  # of the smallest message
    bytes_per_second: float
    wrong_values: int


class FirstStep(_Facts):
    """A preset's first training step on GPUs beside the CPU's in float32.

    rank: the one that differs most. difference: the relative difference of its loss or its update, the larger one.
    """

    preset: str
    precision: str
    rank: int
    difference: float


class GpuOfRank(_Facts):
    """A rank's GPU after it has computed.

    name, capability: from TensorFlow. peak: the most bytes of tensors. uuid, used: the GPU on which the driver sees the
    process, and the bytes that it holds there; "" and 0 where the driver shows no such process, as in a container.
    """

    name: str
    capability: str
    peak: int
    uuid: str
    used: int


class Job(_Facts):
    """The outcome of the small job.

    ranks: their number, by host.
    failure: why the job failed; "": it did not.
    pending: the two hosts of each pair that had begun and not ended when the job ran out of time.
    complaints: lines of the ranks' stderr.
    how: ranks, devices, algorithm and transport, as in the first line of a training.
    """

    ranks: Mapping[str, int]
    failure: str = ""
    pending: tuple[tuple[str, str], ...] = ()
    complaints: tuple[str, ...] = ()
    how: str = ""
    hosts: tuple[str, ...] = ()  # by rank: each one's own host name
    wrong_values: int = 0  # in an all-reduce over all ranks
    links: tuple[Link, ...] = ()
    through: str = ""  # MPI or Horovod: what measured the links
    pairs: int = 0  # of hosts; not all may have been measured
    first_steps: tuple[FirstStep, ...] = ()  # where all ranks compute on GPUs
    gpus: tuple[GpuOfRank, ...] = ()  # by rank, where all ranks compute on GPUs
    seconds: float = 0.0


class Subject(_Facts):
    """All facts from which the findings are drawn.

    hosts: with the slots that a run would use. here: this machine's name, which need not be one of them.
    hosts_option: the option that names the hosts, such as --hostfile FILE.
    silent: for each host that did not answer, what is wrong and what to do.
    network: between the hosts; None: none in common, or one host. blocked: connections that fail on it.
    job: None where it was not started, for the reason `no_job`.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    hosts: tuple[Host, ...]
    here: str
    hosts_option: str
    dataset: DatasetName
    data_dir: str
    run_dir: str
    facts: Mapping[str, HostFacts]
    silent: Mapping[str, tuple[str, str]] = {}
    network: Network | None = None
    blocked: tuple[NoWay, ...] = ()
    hides_gpus: bool = False  # CUDA_VISIBLE_DEVICES is empty or -1 here
    single_copy_off: bool = False  # MPI's setting that ranks do not read each other's memory
    job: Job | None = None
    no_job: str = ""
