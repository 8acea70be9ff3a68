"""What the doctor knows when it judges: each host's facts, the network, and the outcome of the small job.

Sizes are in bytes, times in seconds. `doctor --json` prints all of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Card, Network, NoWay
from hvd_cifar.runtime import devices


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)


class Versions(_Facts):
    """Versions of what a rank runs; `mpi`: the first line of mpirun --version; `code`: a digest, "" without files."""

    python: str
    packages: Mapping[str, str]
    mpi: str
    code: str


class Cpu(_Facts):
    """`cores`: in a process's CPU mask; `quota`: limit of its control groups, in cores."""

    cores: int
    quota: float | None

    @property
    def usable(self) -> int:
        """Cores for ranks."""
        return devices.usable_cores(self.cores, self.quota)

    @field_validator("quota", mode="before")
    @classmethod
    def _of_files(cls, quota: Any) -> Any:
        """The probe sends the texts of `devices.QUOTA_FILES` in each control group."""
        return devices.least_quota(quota) if isinstance(quota, list) else quota


class Gpus(_Facts):
    """The GPUs as `nvidia-smi -L` lists them, and their driver."""

    listing: str
    driver: str


class Memory(_Facts):
    """Free memory, free shared memory, and the soft limit of open files (-1: none)."""

    available: int
    shm_free: int
    open_files: int


class Disk(_Facts):
    """The run's folder, or the nearest existing one above it, and the folder for temporary files.

    error, temporary_error: why nothing can be written there; "": it can.
    """

    folder: str
    free: int
    error: str
    temporary: str
    temporary_error: str


class HostFacts(_Facts):
    """All facts of one host. A group that it did not give is None, for the reason in `missing`."""

    cpu: Cpu | None = None
    memory: Memory | None = None
    versions: Versions | None = None
    gpus: Gpus | None = None
    disk: Disk | None = None
    missing: Mapping[str, str] = {}


GROUPS = ("cpu", "memory", "versions", "gpus", "disk")


class Link(_Facts):
    """An all-reduce between two hosts, or between two ranks of one host (then `b` is `a`)."""

    a: str
    b: str
    ranks: tuple[int, int]
    seconds: float  # of the smallest message
    bytes_per_second: float
    wrong_values: int


class Job(_Facts):
    """The outcome of the small job.

    ranks: their number, by host. hosts: each rank's own host name.
    failure: why the job failed; "": it did not.
    pending: the two hosts of each pair that had begun and not ended when the job ran out of time.
    complaints: lines of the ranks' stderr.
    how: ranks, devices, algorithm and transport, as in the first line of a training.
    wrong_values: in an all-reduce over all ranks. pairs: of hosts; of many hosts not all are measured.
    """

    ranks: Mapping[str, int]
    hosts: tuple[str, ...] = ()
    failure: str = ""
    pending: tuple[tuple[str, str], ...] = ()
    complaints: tuple[str, ...] = ()
    how: str = ""
    wrong_values: int = 0
    links: tuple[Link, ...] = ()
    pairs: int = 0
    seconds: float = 0.0


class Subject(_Facts):
    """What is judged.

    hosts: with the slots that a run would use. here: this machine's name, which need not be one of them.
    facts: of the hosts that answer. silent: for each other host, what is wrong and what to do.
    cards: each host's network cards that are up. network: the one that ranks would use; None: one host, or none in
    common. blocked: connections that fail on it.
    chosen_gpus: this machine's CUDA_VISIBLE_DEVICES.
    job: None where it was not started, for the reason `no_job`.
    """

    hosts: tuple[Host, ...]
    here: str
    facts: Mapping[str, HostFacts]
    silent: Mapping[str, tuple[str, str]] = {}
    cards: Mapping[str, tuple[Card, ...]] = {}
    network: Network | None = None
    blocked: tuple[NoWay, ...] = ()
    chosen_gpus: str | None = None
    job: Job | None = None
    no_job: str = ""

    def facts_of(self, host: str) -> HostFacts:
        """A host's facts; without any where it did not answer."""
        return self.facts.get(host, HostFacts())

    def gpus_of(self, host: str) -> list[str] | None:
        """The names of the GPUs that ranks on a host see; None: not known.

        Variables of this machine count here alone, but an empty CUDA_VISIBLE_DEVICES hides the GPUs of all hosts.
        """
        gpus = self.facts_of(host).gpus
        if gpus is None:
            return None
        counts = self.chosen_gpus is not None and (host == self.here or devices.hides_all(self.chosen_gpus))
        seen = devices.visible_gpus(gpus.listing, {"CUDA_VISIBLE_DEVICES": self.chosen_gpus or ""} if counts else {})
        named = {uuid: name for name, uuid in re.findall(r"^GPU \d+: (.*) \(UUID: ([^)]+)\)", gpus.listing, re.M)}
        return [named[uuid] for uuid in seen]

    def computes_on_gpus(self, host: str) -> bool:
        """Whether ranks compute on a host's GPUs."""
        return bool(self.gpus_of(host)) and self.is_for_gpus(host)

    def is_for_gpus(self, host: str) -> bool:
        """Whether a host's environment is for GPUs: set-up then installs NCCL, on which it builds Horovod."""
        versions = self.facts_of(host).versions
        return versions is not None and any(name.startswith("nvidia-nccl") for name in versions.packages)
