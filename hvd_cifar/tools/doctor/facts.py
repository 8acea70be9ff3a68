"""What the doctor knows when it judges: each host's facts, the network, and the outcome of the small job.

Sizes are in bytes, times in seconds. `doctor --json` prints all of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import Network, Participants, Unreachable, find_network, running
from hvd_cifar.runtime import devices

PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class HostFacts:
    """The facts of one host.

    versions: of Python, and of packages whose arithmetic or messages must be the same on all hosts.
    code: a digest of this project's files. is_for_gpus: whether set-up has installed NCCL.
    gpus: that ranks may use. memory: free, within the limits of control groups. shm: free in /dev/shm.
    temporary: the folder for temporary files; temporary_error: why nothing can be written there, "": it can.
    """

    versions: Mapping[str, str]
    code: str
    is_for_gpus: bool
    gpus: list[str]
    memory: int
    shm: int
    temporary: str
    temporary_error: str

    @property
    def computes_on_gpus(self) -> bool:
        """Whether ranks compute on the host's GPUs."""
        return self.is_for_gpus and bool(self.gpus)


@dataclass(frozen=True)
class Job:
    """The outcome of the small job.

    failure: why it failed; "": it did not. seconds: of all of it.
    how: ranks, devices, algorithm and transport, as in the first line of a training.
    wrong_values: in all-reduces. bytes_per_second: that each rank sends, and receives, in those over all ranks.
    """

    failure: str = ""
    how: str = ""
    wrong_values: int = 0
    bytes_per_second: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Subject:
    """What is judged.

    hosts: with the slots that a run would use. here: this machine's name, which need not be one of them.
    facts: of the hosts that answer. silent: for each other host, what is wrong and what to do.
    network: that ranks would use; None: one host, or none in common that works, for the reason in `no_network`.
    job: None where it was not started.
    """

    hosts: tuple[Host, ...]
    here: str
    facts: Mapping[str, HostFacts]
    silent: Mapping[str, tuple[str, str]]
    network: Network | None = None
    no_network: str = ""
    job: Job | None = None

    @property
    def known(self) -> list[tuple[Host, HostFacts]]:
        """The hosts that answer, with their facts."""
        return [(host, self.facts[host.name]) for host in self.hosts if host.name in self.facts]


def ask(hosts: tuple[Host, ...], participants: Participants, seconds: float) -> Subject:
    """Ask all participants for their facts, for at most `seconds`, then test the connections between those that answer.

    `hosts`: with the slots that a run would use; `participants` may have this machine besides.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")

    def question(host: str) -> dict[str, str | None]:
        # Variables of this machine count here alone; but where they hide all GPUs, they do so on all hosts.
        return {"visible_gpus": chosen if devices.hides_all(chosen) or host == participants.here else None}

    with running(participants, PROBE.read_text(), seconds, question) as (_, answers, silent):
        facts = {host: HostFacts(**answer) for host, answer in answers.items()}
    subject = Subject(hosts, participants.here, facts, silent)
    if len(facts) < 2:
        return subject
    try:
        return replace(subject, network=find_network(replace(participants, hosts=list(facts))))
    except Unreachable as failure:
        return replace(subject, no_network=str(failure))
