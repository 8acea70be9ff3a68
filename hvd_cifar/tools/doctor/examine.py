"""`doctor`, as one process on the user's machine: ask all hosts, run the small job, print the findings."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hvd_cifar
from hvd_cifar.config import DoctorSettings
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.data.source import layout_of
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.launch.cluster import slurm, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local, parse_hosts, ranks_by_default, read_hostfile
from hvd_cifar.launch.cluster.program import Participants, Way
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime import devices
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.tools.doctor import ask, findings, job, machine, table
from hvd_cifar.tools.doctor.facts import HostFacts, Subject

SINGLE_COPY = "OMPI_MCA_btl_vader_single_copy_mechanism"
LEAST_WIDTH, WIDTH_OF_A_FILE = 60, 120


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
    in_slurm = bool(nodes)
    way: Way = slurm if in_slurm else ssh
    names = [host.name for host in hosts]
    here = next((name for name in names if is_local(name)), socket.gethostname())
    everyone = list(dict.fromkeys([here, *names]))  # this machine takes part even if it has no rank
    _tell(f"asking {len(everyone)} host{'s' * (len(everyone) > 1)} ...")
    questions = _questions(settings, everyone)
    participants = Participants(everyone, here, sys.executable, way)
    answers = ask.ask_all(participants, questions, settings.probe_timeout)
    facts = as_ranks_see(answers.facts, here, os.environ)
    subject = Subject(
        hosts=_with_slots(hosts, facts),
        here=here,
        hosts_option=_hosts_option(settings, hosts),
        dataset=settings.dataset,
        data_dir=str(settings.data_dir),
        run_dir=str(settings.run_dir),
        facts=facts,
        hides_gpus=devices.hides_all(os.environ.get("CUDA_VISIBLE_DEVICES")),
        silent=answers.silent,
        network=answers.network,
        blocked=tuple(answers.blocked),
        single_copy_off=os.environ.get(SINGLE_COPY) in ("none", "emulated"),
    )
    subject = _with_job(subject, settings, in_slurm)
    found = findings.of(subject)
    if settings.as_json:
        terminal.say(table.as_json(subject, found))
    else:
        watched = sys.stdout.isatty()
        width = max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH_OF_A_FILE, 24)).columns)
        terminal.say(table.of(subject, found, width, colour=watched and "NO_COLOR" not in os.environ))
    if failed := [finding for finding in found if finding.level == "failure"]:
        what = ", ".join(dict.fromkeys(f"{f.check}{' on ' * bool(f.host)}{f.host}" for f in failed))
        raise TrainingError(f"a run would fail: {what}")


def hosts_of(settings: DoctorSettings, nodes: tuple[Host, ...] = ()) -> tuple[Host, ...]:
    """The hosts, with the slots that a run would use; this machine with 0 slots where neither hosts nor -np is given.

    `nodes`: of the Slurm allocation, () outside of one.

    Raises UserError.
    """
    if settings.hostfile is not None:
        hosts = read_hostfile(settings.hostfile)
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


def _hosts_option(settings: DoctorSettings, hosts: Sequence[Host]) -> str:
    """The option that names these hosts; "" for this machine alone."""
    if settings.hostfile is not None:
        inside = settings.hostfile.is_relative_to(Path.cwd())
        return f"--hostfile {settings.hostfile.relative_to(Path.cwd()) if inside else settings.hostfile}"
    if settings.hosts is None and len(hosts) == 1:
        return ""
    return f"-H {','.join(f'{host.name}:{host.slots}' for host in hosts)}"


def as_ranks_see(facts: Mapping[str, HostFacts], here: str, environment: Mapping[str, str]) -> dict[str, HostFacts]:
    """The facts, without the GPUs that CUDA_VISIBLE_DEVICES hides on this machine; over MPI an empty one hides all."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return dict(facts)
    hides, listing = devices.hides_all(chosen), devices.list_gpus()
    every, visible = (devices.visible_gpus(listing, variables) for variables in ({}, environment))
    seen = [] if hides else [every.index(uuid) for uuid in visible]
    return {
        name: found.model_copy(update={"gpus": tuple(found.gpus[i] for i in seen if i < len(found.gpus))})
        if found.gpus and (name == here or hides)
        else found
        for name, found in facts.items()
    }


def _with_slots(hosts: tuple[Host, ...], facts: Mapping[str, HostFacts]) -> tuple[Host, ...]:
    """The hosts; 0 slots become the number of ranks that the launcher starts by default."""
    if hosts[0].slots:
        return hosts
    found = facts.get(hosts[0].name, HostFacts())
    gpus = len(found.gpus or ()) if machine.computes_on_gpus(found) else 0
    return (replace(hosts[0], slots=ranks_by_default(gpus, found.cpu.usable if found.cpu else 1)),)


def _questions(settings: DoctorSettings, everyone: Sequence[str]) -> dict[str, Any]:
    """The questions for `probe.py`."""
    folder = settings.data_dir
    layout = layout_of(settings.dataset) or CIFAR10
    folders = [folder / layout.folder] if settings.dataset == "synthetic" else [folder, folder / layout.folder]
    if layout_of(settings.dataset) is None:  # images in folders, or a function: not examined
        folders = []
    return {
        "hosts": list(everyone),
        "package": str(Path(hvd_cifar.__file__).parent),
        "quota_files": devices.QUOTA_FILES,
        "run_dir": str(settings.run_dir),
        "data_folders": [str(each) for each in folders],
        "data_files": list(layout.files),
        "record_bytes": layout.record_bytes,
        "label_bytes": layout.label_bytes,
        "classes": layout.classes,
    }


def _with_job(subject: Subject, settings: DoctorSettings, in_slurm: bool) -> Subject:
    hosts = [Host(host.name, _ranks_on(host, subject)) for host in findings.hosts_for_the_job(subject)]
    if not hosts:
        return subject.model_copy(update={"no_job": "there is no host on which ranks can start"})
    if in_slurm:  # the launcher takes all nodes of the allocation
        if len(hosts) < len(subject.hosts):
            return subject.model_copy(update={"no_job": "not all nodes of this Slurm job can take part"})
        hosts = list(subject.hosts)
    ranks = sum(host.slots for host in hosts)
    _tell(f"a small job of {ranks} rank{'s' * (ranks > 1)} on {len(hosts)} host{'s' * (len(hosts) > 1)} ...")
    unnamed = in_slurm or (len(hosts) == 1 and hosts[0].name == subject.here)
    on_gpus = all(machine.computes_on_gpus(subject.facts.get(host.name, HostFacts())) for host in hosts)
    done = job.run(hosts, unnamed, settings.allreduce == "ring", on_gpus, settings.job_timeout)
    return subject.model_copy(update={"job": done})


def _ranks_on(host: Host, subject: Subject) -> int:
    """The job's ranks on a host: at most two, which is enough for a link between them; all where GPUs compute."""
    facts = subject.facts.get(host.name, HostFacts())
    return host.slots if machine.computes_on_gpus(facts) else min(host.slots, job.LOCAL_RANKS)


def _tell(text: str) -> None:
    """Print progress, if stderr is a terminal."""
    if sys.stderr.isatty():
        terminal.complain(text)
