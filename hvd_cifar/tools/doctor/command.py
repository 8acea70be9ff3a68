"""`doctor`: ask all hosts, run the small job, print the findings as a table or as JSON."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hvd_cifar
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local, parse_hosts, ranks_by_default, read_hostfile
from hvd_cifar.launch.cluster.program import Participants, Way
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.tools.doctor import ask, checks, job
from hvd_cifar.tools.doctor.facts import Job, Subject
from hvd_cifar.tools.doctor.finding import Finding, counted
from hvd_cifar.tools.doctor.job import LOCAL_RANKS
from hvd_cifar.tools.settings import DoctorSettings

LEAST_WIDTH, WIDTH_OF_A_FILE = 60, 120
WORDS = {"ok": Text("ok", "green"), "warning": Text("warn", "yellow"), "failure": Text("FAIL", "bold red")}


def examine(settings: DoctorSettings) -> None:
    """Examine all hosts, and print the findings.

    Raises:
        UserError: where the options for hosts or ranks are wrong, or a launcher started this process.
        TrainingError: where a run would fail.
    """
    # sys.exit raises, so `finally` blocks end the programs on other hosts.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if (launched_size() or 1) > 1:
        raise UserError("a launcher started several doctors; a doctor starts its own ranks: run it without a launcher")
    nodes = () if settings.hosts or settings.hostfile else slurm.allocation(os.environ)
    hosts = hosts_of(settings, nodes)
    names = [host.name for host in hosts]
    here = next((name for name in names if is_local(name)), socket.gethostname())
    everyone = list(dict.fromkeys([here, *names]))  # this machine takes part even if it has no rank
    way: Way = slurm if nodes else ssh
    questions = {
        "package": str(Path(hvd_cifar.__file__).parent),
        "quota_files": devices.QUOTA_FILES,
        "run_dir": str(settings.run_dir),
    }
    _tell(f"asking {counted(len(everyone), 'host')} ...")
    answers = ask.ask_all(Participants(everyone, here, sys.executable, way), questions, settings.probe_timeout)
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    subject = Subject(hosts=hosts, here=here, chosen_gpus=chosen, **answers)
    if not hosts[0].slots:
        subject = subject.model_copy(update={"hosts": (replace(hosts[0], slots=_slots_by_default(subject)),)})
    subject = subject.model_copy(update=_try_job(subject, settings, bool(nodes)))
    found = checks.findings(subject, checks.CHECKS, _hosts_option(settings, hosts))
    terminal.say(as_json(subject, found) if settings.as_json else as_table(found))
    if failed := [f"{one.check}{' on ' * bool(one.host)}{one.host}" for one in found if one.level == "failure"]:
        raise TrainingError(f"a run would fail: {', '.join(dict.fromkeys(failed))}")


def hosts_of(settings: DoctorSettings, nodes: tuple[Host, ...] = ()) -> tuple[Host, ...]:
    """The hosts, with the slots that a run would use; this machine with 0 slots where neither hosts nor -np is given.

    `nodes`: of the Slurm allocation, () outside of one.

    Raises UserError.
    """
    if settings.hostfile is not None:
        hosts = read_hostfile(settings.hostfile, counts_cores=False)
    elif settings.hosts is not None:
        hosts = parse_hosts(settings.hosts)
    elif nodes:
        hosts = nodes
    else:
        return (Host("localhost", settings.ranks or 0),)
    slots = sum(host.slots for host in hosts)
    if settings.ranks is None:
        return hosts
    if settings.ranks > slots:
        raise UserError(f"-np {settings.ranks} is more than the {slots} slots of the hosts; lower it or add slots")
    used = Counter(hosts_of_ranks(hosts, settings.ranks))
    return tuple(Host(name, count) for name, count in used.items())


def _slots_by_default(subject: Subject) -> int:
    """The ranks that the launcher starts by default on this machine, the subject's only host."""
    name = subject.hosts[0].name
    cpu = subject.facts_of(name).cpu
    gpus = len(subject.gpus_of(name) or ()) if subject.computes_on_gpus(name) else 0
    return ranks_by_default(gpus, cpu.usable if cpu else 1)


def _hosts_option(settings: DoctorSettings, hosts: Sequence[Host]) -> str:
    """The option that names these hosts; "" for this machine alone."""
    if settings.hostfile is not None:
        near = os.path.relpath(settings.hostfile)
        return f"--hostfile {settings.hostfile if near.startswith('..') else near}"
    if settings.hosts is None and len(hosts) == 1:
        return ""
    return f"-H {','.join(f'{host.name}:{host.slots}' for host in hosts)}"


def _try_job(subject: Subject, settings: DoctorSettings, in_slurm: bool) -> dict[str, Job | str]:
    """Run the small job on the hosts that can take part: `job` of the subject, or `no_job`, the reason for none."""
    hosts = checks.hosts_for_the_job(subject)
    if not hosts:
        return {"no_job": "there is no host on which ranks can start"}
    if in_slurm and len(hosts) < len(subject.hosts):  # the launcher takes all nodes of the allocation
        return {"no_job": "not all nodes of this Slurm job can take part"}
    if not in_slurm and not all(subject.computes_on_gpus(host.name) for host in hosts):
        hosts = [Host(host.name, min(host.slots, LOCAL_RANKS)) for host in hosts]
    ranks = sum(host.slots for host in hosts)
    _tell(f"a small job of {counted(ranks, 'rank')} on {counted(len(hosts), 'host')} ...")
    named = not in_slurm and [host.name for host in hosts] != [subject.here]
    words = job.command(hosts, named, settings.allreduce == "ring")
    return {"job": job.run(hosts, words, settings.job_timeout)}


def _tell(text: str) -> None:
    """Print progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        terminal.complain(text)


def as_table(found: Sequence[Finding], width: int = 0) -> str:
    """A row for each finding, with advice below it; then a summary. `width`: 0: the terminal's."""
    is_watched = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    width = width or max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH_OF_A_FILE, 24)).columns)
    console = Console(width=width, highlight=False, force_terminal=is_watched, emoji=False, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("what", "", "where"):
        table.add_column(name, no_wrap=True)
    table.add_column("found")
    check = ""
    for one in found:
        text = Text(one.text)
        if one.remedy:
            text.append(f"\n-> {one.remedy}", style="bold")
        table.add_row(one.check if one.check != check else "", WORDS[one.level], one.host, text)
        check = one.check
    with console.capture() as capture:
        console.print(table)
        console.print(f"\n{summary(found)}")
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def summary(found: Sequence[Finding]) -> str:
    """The summary, one line."""
    counts = Counter(one.level for one in found)
    parts = [counted(counts[level], level) for level in ("failure", "warning") if counts[level]]
    if counts["failure"]:
        return f"A run would fail: {' and '.join(parts)}."
    return f"A run would work; {parts[0]}." if parts else "All is well."


def as_json(subject: Subject, found: Sequence[Finding]) -> str:
    """Findings and all facts, for programs."""
    network = subject.network
    content = {
        "would_fail": any(one.level == "failure" for one in found),
        "findings": [one._asdict() for one in found],
        "hosts": {host.name: host.slots for host in subject.hosts},
        "network": network and {"subnet": network.subnet, "cards": {h: c.name for h, c in network.cards.items()}},
        "job": subject.job and subject.job.model_dump(),
        "facts": {name: facts.model_dump() for name, facts in subject.facts.items()},
    }
    return json.dumps(content, indent=1)
