"""From facts to findings: pure functions, one for each check.

A failure means that a run would fail. A warning means that it would be slow, or give surprising results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import unusable
from hvd_cifar.tools.doctor import machine, outcome, reach, software
from hvd_cifar.tools.doctor.facts import Subject
from hvd_cifar.tools.doctor.finding import Finding

CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    reach.ssh,
    reach.names,
    reach.network,
    reach.ports,
    software.versions,
    software.horovod,
    machine.cpus,
    machine.gpus,
    machine.shared_memory,
    machine.memory,
    machine.open_files,
    machine.disk,
    machine.clocks,
    machine.data,
    outcome.job,
    outcome.links,
    outcome.first_steps,
)
OF_THE_JOB = (outcome.job, outcome.links, outcome.first_steps)
# A host that fails one of these checks takes no part in the job: its ranks could not start, or not connect.
BARS_FROM_JOB = (
    "ssh",
    "names",
    "versions",
    "Horovod",
    "cores",
    "GPUs",
    "shared memory",
    "memory",
    "open files",
    "disk",
)


def of(subject: Subject) -> list[Finding]:
    """All findings, in the order of the checks."""
    found = [finding for check in CHECKS for finding in check(subject)]
    option = subject.hosts_option or "--hostfile FILE"
    return [each.model_copy(update={"remedy": each.remedy.replace("--hostfile FILE", option)}) for each in found]


def before_the_job(subject: Subject) -> list[Finding]:
    """The findings that do not depend on the job."""
    return [finding for check in CHECKS if check not in OF_THE_JOB for finding in check(subject)]


def hosts_for_the_job(subject: Subject) -> list[Host]:
    """The hosts on which ranks can start and connect to each other; the others have failures that say why not."""
    barred = {f.host for f in before_the_job(subject) if f.level == "failure" and f.check in BARS_FROM_JOB}
    left = [host for host in subject.hosts if host.name in subject.facts and host.name not in barred]
    names = {host.name for host in left} | {subject.here}
    out = unusable([way for way in subject.blocked if {way.here, way.there} <= names], subject.here)
    return [host for host in left if host.name not in out]
