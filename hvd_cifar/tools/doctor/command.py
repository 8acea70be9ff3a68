"""`doctor`: ask all hosts, run the small job, print the findings as lines or as JSON."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.files import complain
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, is_local
from hvd_cifar.launch.cluster.network import Participants
from hvd_cifar.launch.command import check_slots, first_slots, named_hosts, ranks_of, slots_of
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.tools.doctor import checks, facts, job
from hvd_cifar.tools.doctor.checks import Finding, counted
from hvd_cifar.tools.doctor.facts import Job, Subject
from hvd_cifar.tools.settings import DoctorSettings

LOCAL_RANKS = 2  # of the job on each host: enough for messages between them; where GPUs compute, all take part
WORDS = {"ok": "ok", "warning": "warn", "failure": "FAIL"}


def examine(settings: DoctorSettings) -> None:
    """Examine all hosts, and print the findings. UserError for wrong hosts, TrainingError where a run would fail."""
    # sys.exit raises, so `finally` blocks end the programs on other hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if (launched_size() or 1) > 1:
        raise UserError("a launcher started several doctors; a doctor starts its own ranks: run it without a launcher")
    nodes = () if settings.hosts or settings.hostfile else slurm.allocation(os.environ)
    hosts = hosts_of(settings, nodes)
    names = [host.name for host in hosts]
    here = next((name for name in names if is_local(name)), socket.gethostname())
    everyone = list(dict.fromkeys([here, *names]))  # this machine takes part even if it has no rank
    way = slurm if nodes else ssh
    _tell(f"asking {counted(len(everyone), 'host')} ...")
    participants = Participants(everyone, here, way)
    subject = facts.ask(hosts, participants, settings.probe_timeout)
    if not any(one.level == "failure" for one in checks.findings(subject, checks.OF_HOSTS)):
        subject = replace(subject, job=_run_job(subject, settings, bool(nodes)))
    found = checks.findings(subject, checks.CHECKS, _hosts_option(settings, hosts))
    terminal.say(as_json(subject, found) if settings.as_json else as_text(found))
    if failed := [f"{one.check}{' on ' * bool(one.host)}{one.host}" for one in found if one.level == "failure"]:
        raise TrainingError(f"a run would fail: {', '.join(dict.fromkeys(failed))}")


def hosts_of(settings: DoctorSettings, nodes: tuple[Host, ...] = ()) -> tuple[Host, ...]:
    """The hosts, with the slots that a run would use. UserError where there are too few slots.

    `nodes`: of the Slurm allocation, () outside of one.
    """
    hosts = named_hosts(settings) or nodes or (Host("localhost", settings.ranks or ranks_of(())),)
    check_slots(settings.ranks, hosts)
    return first_slots(hosts, settings.ranks) if settings.ranks else hosts


def _hosts_option(settings: DoctorSettings, hosts: Sequence[Host]) -> str:
    """The option that names these hosts; "" for this machine alone."""
    if settings.hostfile is not None:
        near = os.path.relpath(settings.hostfile)
        return f"--hostfile {settings.hostfile if near.startswith('..') else near}"
    if settings.hosts is None and len(hosts) == 1:
        return ""
    return f"-H {_listed(hosts)}"


def _listed(hosts: Sequence[Host]) -> str:
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _run_job(subject: Subject, settings: DoctorSettings, in_slurm: bool) -> Job:
    """Run the small job on all hosts."""
    hosts = list(subject.hosts)
    if not in_slurm and not all(found.computes_on_gpus for _, found in subject.known):
        hosts = [Host(host.name, min(host.slots, LOCAL_RANKS)) for host in hosts]
    ranks = slots_of(hosts)
    _tell(f"a small job of {counted(ranks, 'rank')} on {counted(len(hosts), 'host')} ...")
    words = ["-np", str(ranks), *(["--allreduce", "ring"] if settings.allreduce == "ring" else [])]
    if not in_slurm and [host.name for host in hosts] != [subject.here]:
        words += ["-H", _listed(hosts)]
    return job.run(words, settings.job_timeout)


def _tell(text: str) -> None:
    """Print progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        complain(text)


def as_text(found: Sequence[Finding]) -> str:
    """A line for each finding, with advice below it; then a summary."""
    width = max(len(one.host) for one in found)
    lines = []
    for one in found:
        start = f"{one.check:<13}  {WORDS[one.level]:<4}  {one.host:<{width}}  "
        lines.append((start + one.text).rstrip())
        lines += [f"{'':<{len(start)}}-> {one.remedy}"] if one.remedy else []
    return "\n".join([*lines, "", summary(found)])


def summary(found: Sequence[Finding]) -> str:
    """The summary, one line."""
    counts = Counter(one.level for one in found)
    failures, warnings = counted(counts["failure"], "failure"), counted(counts["warning"], "warning")
    if counts["failure"]:
        return f"A run would fail: {failures}{f' and {warnings}' if counts['warning'] else ''}."
    return f"A run would work; {warnings}." if counts["warning"] else "All is well."


def as_json(subject: Subject, found: Sequence[Finding]) -> str:
    """Findings and all facts, for programs."""
    content = {
        "would_fail": any(one.level == "failure" for one in found),
        "findings": [one._asdict() for one in found],
        "hosts": {host.name: host.slots for host in subject.hosts},
        "network": subject.network and asdict(subject.network),
        "job": subject.job and asdict(subject.job),
        "facts": {name: asdict(found) for name, found in subject.facts.items()},
    }
    return json.dumps(content, indent=1)
