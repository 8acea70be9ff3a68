"""What is known of the hosts before anything is judged, as it also stands in the doctor's JSON.

Sizes are in bytes, times in seconds. A group of facts that a host could not tell is None.
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
    """What Horovod was built for, and with: MPI, Gloo, NCCL."""

    tensorflow: str
    features: tuple[str, ...]


class Versions(_Facts):
    """What a rank would run there."""

    python: str
    packages: Mapping[str, str]
    mpi: str  # what mpirun says of itself
    horovod: HorovodBuild | None
    code: str  # digest of this project's files; "": they are not there


class Cpu(_Facts):
    """The cores that a process may use, within the container's limit (`quota`, in cores), and how many are in use."""

    cores: int
    quota: float | None
    load: float  # of the last minute
    model: str
    flags: tuple[str, ...]

    @property
    def usable(self) -> int:
        """Cores for ranks."""
        return devices.usable_cores(self.cores, self.quota)

    @field_validator("quota", mode="before")
    @classmethod
    def _of_files(cls, quota: Any) -> Any:
        """The probe sends the texts of the files as they are."""
        return devices.quota_of(quota) if isinstance(quota, list) else quota


class Gpu(_Facts):
    """A GPU as nvidia-smi lists it."""

    name: str
    driver: str


class Memory(_Facts):
    """Memory of all kinds."""

    available: int
    shm_total: int
    shm_free: int
    attach_error: str  # why processes cannot read each other's memory; "": they can
    open_files: int  # the soft limit, -1: none


class Card(_Facts):
    """A network card with an IPv4 address; `speed` in Mbit/s, 0: it does not say."""

    name: str
    address: str
    netmask: str
    up: bool
    speed: int

    @property
    def subnet(self) -> str:
        """As in 10.0.0.0/24."""
        return str(ipaddress.ip_network(f"{self.address}/{self.netmask}", strict=False))


class Names(_Facts):
    """The host's own name and cards, and what it takes names and addresses for."""

    hostname: str
    cards: tuple[Card, ...]
    addresses: Mapping[str, tuple[str, ...]]  # by name; of all hosts, and its own
    names: Mapping[str, str]  # by address; "": it has no name for it


class Disk(_Facts):
    """The run's folder, or the nearest one above it that is there; and the folder for temporary files."""

    folder: str
    free: int
    error: str  # why nothing can be written there; "": it can
    temporary: str
    temporary_error: str


class DataFile(_Facts):
    """A file of the data set; `wrong_label_at`: the first record whose label is none, -1: there is no such."""

    bytes: int
    sha256: str
    wrong_label_at: int


class Data(_Facts):
    """The data set on a host."""

    folder: str
    files: Mapping[str, DataFile]


class HostFacts(_Facts):
    """All that one host said of itself.

    clock: how far its clock is ahead of this machine's, and how far off that may be.
    missing: what kept it from telling the groups that are None.
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
    """An all-reduce between two hosts, or between two ranks of one (`b` is `a` then)."""

    a: str
    b: str
    seconds: float  # of the smallest one
    bytes_per_second: float
    wrong_values: int


class Job(_Facts):
    """How the small job went.

    ranks: of each host that took part.
    failure: why it did not come to its end, in words; "": it did.
    pending: hosts of pairs that had begun and not ended, where it was ended for lack of time.
    complaints: what its ranks wrote to stderr.
    how: ranks, devices, algorithm and transport, as a training says it.
    """

    ranks: Mapping[str, int]
    failure: str = ""
    pending: tuple[tuple[str, str], ...] = ()
    complaints: tuple[str, ...] = ()
    how: str = ""
    hosts: tuple[str, ...] = ()  # by rank, as each calls itself
    wrong_values: int = 0  # in an all-reduce over all ranks
    links: tuple[Link, ...] = ()
    through: str = ""  # what the links were measured through: MPI or Horovod
    pairs: int = 0  # of hosts, of which some may have been left out
    seconds: float = 0.0


class Subject(_Facts):
    """All that the findings are drawn from.

    hosts: with the slots that a job would use; here: this machine's name, which may be none of them.
    hosts_option: how a command line names the hosts, such as --hostfile FILE.
    silent: what is wrong with hosts that did not answer, and what mends it.
    network: what would join the hosts, None: nothing does, or all is one host. blocked: where it does not lead.
    job: None: it was not started; why not: `no_job`.
    """

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    hosts: tuple[Host, ...]
    here: str
    hosts_option: str
    gloo: bool
    dataset: DatasetName
    data_dir: str
    run_dir: str
    facts: Mapping[str, HostFacts]
    silent: Mapping[str, tuple[str, str]] = {}
    network: Network | None = None
    blocked: tuple[NoWay, ...] = ()
    single_copy_off: bool = False  # MPI was told not to let ranks read each other's memory
    job: Job | None = None
    no_job: str = ""
