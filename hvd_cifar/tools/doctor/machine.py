"""Findings on what each host has for its ranks: cores, GPUs, memory, files, a clock, the data set."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from hvd_cifar.data.cifar import Layout
from hvd_cifar.data.source import layout_of
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.tools.doctor.facts import Data, HostFacts, Subject
from hvd_cifar.tools.doctor.finding import (
    GIB,
    MIB,
    SET_UP,
    SET_UP_ALL,
    Finding,
    Level,
    counted,
    listed,
    seconds,
    size,
    some_hosts,
)

# A rank that trains has about 600 MiB of its own (docs/notebook/2026-11-23-performance.md).
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, 1 * GIB
# What Open MPI lays out in /dev/shm for a rank; NCCL takes more for each pair of GPUs.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# TensorFlow, Horovod and Open MPI in a rank open about 50 files, and a few more for each other rank.
LEAST_FILES, FILES_PER_RANK, GOOD_FILES = 64, 4, 512
# Five checkpoints of the largest model are about 100 MiB.
LEAST_DISK, GOOD_DISK = 100 * MIB, 1 * GIB
CLOCK_SECONDS = 2.0
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
NEEDED_FLAGS = ("avx", "f16c", "fma")  # TensorFlow is built for the first, Horovod with all that set-up found
LET_READ = "docker run --cap-add=SYS_PTRACE, or: export OMPI_MCA_btl_vader_single_copy_mechanism=none"
RUN_FOLDER = "run folder"


def cpus(subject: Subject) -> Iterator[Finding]:
    """A core for each rank, unless GPUs compute, and processors that can do the same."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="cores", level=level, host=host, text=text, mend=mend))

    known = {host.name: cpu for host in subject.hosts if (cpu := _facts_of(subject, host).cpu)}
    flags = {name: set(cpu.flags) for name, cpu in known.items()}
    for host in subject.hosts:
        cpu = known.get(host.name)
        if cpu and host.slots > cpu.usable and not computes_on_gpus(_facts_of(subject, host)):
            text = f"{host.slots} slots share {counted(cpu.usable, 'core')}: results stay right, speed does not"
            found(host.name, "warning", text, f"give it slots={cpu.usable}")
    all_flags = set().union(*flags.values())
    for name, have in flags.items():
        lacking = [flag for flag in NEEDED_FLAGS if flag in all_flags - have]
        if lacking:
            text = f"its processor ({known[name].model}) has no {', '.join(lacking)}, which others have"
            found(
                name,
                "failure",
                text,
                "leave it out: what is built for the others ends there with an illegal instruction",
            )
    without = [name for name, have in flags.items() if not have & BFLOAT16]
    if without and len(without) < len(flags):
        text = f"no instructions for bfloat16 on {listed(without)}: all ranks would compute in float32"
        found(without[0] if len(without) == 1 else "", "warning", text, "leave out those hosts, or give --precision")
    yield from wrong
    if known and not wrong:
        shown = [
            f"{counted(known[host.name].usable, 'core')} for {counted(host.slots, 'rank')}"
            for host in subject.hosts
            if host.name in known
        ]
        yield Finding(check="cores", level="ok", text=listed(list(dict.fromkeys(shown))))


def gpus(subject: Subject) -> Iterator[Finding]:
    """A GPU for each rank, where there are any, and one driver."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="GPUs", level=level, host=host, text=text, mend=mend))

    known = {host.name: facts for host in subject.hosts if (facts := _facts_of(subject, host)).gpus is not None}
    counts = {name: len(facts.gpus or ()) for name, facts in known.items()}
    for host in subject.hosts:
        count = counts.get(host.name, 0)
        if not count:
            continue
        if not computes_on_gpus(known[host.name]):
            text = f"{counted(count, 'GPU')}, but the environment is one for the CPU"
            found(host.name, "warning", text, f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu")
        elif host.slots > count:
            text = f"{host.slots} slots, but {counted(count, 'GPU')}"
            found(host.name, "failure", text, f"give it slots={count}")
    without = [name for name, count in counts.items() if not count]
    if without and any(computes_on_gpus(facts) for facts in known.values()):
        text = f"no GPU on {listed(without)}, unlike on the others: nvidia-smi lists none"
        found(without[0] if len(without) == 1 else "", "failure", text, "nvidia-smi: what does it say there?")
    drivers = {name: {gpu.driver for gpu in facts.gpus or ()} for name, facts in known.items()}
    if len(set().union(*drivers.values())) > 1:
        shown = "; ".join(f"{name}: {', '.join(sorted(of_host))}" for name, of_host in drivers.items() if of_host)
        found("", "warning", f"drivers differ ({shown})", "install one driver on all")
    yield from wrong
    if known and not wrong:
        kinds = Counter(gpu.name for facts in known.values() for gpu in facts.gpus or ())
        text = ", ".join(f"{count} x {name}" for name, count in kinds.items()) or "none: the CPU computes"
        yield Finding(check="GPUs", level="ok", text=text)


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Room in /dev/shm, and leave to read each other's memory: how the ranks of one host talk."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="shared memory", level=level, host=host, text=text, mend=mend))

    known = {host.name: memory for host in subject.hosts if (memory := _facts_of(subject, host).memory)}
    for host in subject.hosts:
        memory = known.get(host.name)
        if memory is None or host.slots == 1:  # a rank alone has nobody to share with
            continue
        on_gpus = computes_on_gpus(_facts_of(subject, host))
        need = host.slots * (SHM_OF_A_GPU if on_gpus else SHM_OF_A_RANK)
        if memory.shm_free < need and (on_gpus or not subject.gloo):
            text = f"{size(memory.shm_free)} free in /dev/shm, but {host.slots} ranks need {size(need)}: "
            text += "NCCL would fail" if on_gpus else "they would talk over TCP, slower"
            mend = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            found(host.name, "failure" if on_gpus else "warning", text, mend)
        if memory.attach_error and not subject.gloo and not subject.single_copy_off:
            # Open MPI 4.1.8 then copies through /dev/shm, and complains of every message.
            text = f"ranks may not read each other's memory ({memory.attach_error}): MPI says 'Read -1, expected'"
            found(host.name, "warning", text, LET_READ)
    yield from wrong
    if known and not wrong:
        free = size(min(memory.shm_free for memory in known.values()))
        attach = " ranks may read each other's memory" if not any(m.attach_error for m in known.values()) else ""
        least = "at least " * (len(known) > 1)
        yield Finding(
            check="shared memory", level="ok", text=f"{least}{free} free in /dev/shm{';' * bool(attach)}{attach}"
        )


def memory(subject: Subject) -> Iterator[Finding]:
    """Memory for each rank."""
    yield from _enough(
        subject,
        "memory",
        lambda host, facts: facts.memory.available / host.slots if facts.memory else None,
        lambda host: (LEAST_MEMORY, GOOD_MEMORY),
        lambda host, value: (
            f"{size(value)} free for each of {counted(host.slots, 'rank')}, which take about {size(LEAST_MEMORY)}",
            "end what else runs there, or give it fewer slots",
        ),
        lambda least: f"at least {size(least)} free for each rank",
    )


def open_files(subject: Subject) -> Iterator[Finding]:
    """Files and connections that a process may have open, as ssh sets it for ranks."""
    ranks = sum(host.slots for host in subject.hosts)
    need = LEAST_FILES + FILES_PER_RANK * ranks

    def limit(_: Host, facts: HostFacts) -> float | None:
        files = facts.memory.open_files if facts.memory else None
        return float("inf") if files == -1 else files

    yield from _enough(
        subject,
        "open files",
        limit,
        lambda host: (need, max(need, GOOD_FILES)),
        lambda host, value: (
            f"a process may open {value:.0f} files; a rank of {ranks} needs about {need}",
            "echo '* soft nofile 65536' > /etc/security/limits.d/hvd_cifar.conf, then log in anew",
        ),
        lambda least: "no limit" if least == float("inf") else f"at least {least:,.0f} for each process",
    )


def _enough(
    subject: Subject,
    check: str,
    value_of: Callable[[Host, HostFacts], float | None],
    limits: Callable[[Host], tuple[float, float]],
    say: Callable[[Host, float], tuple[str, str]],
    say_ok: Callable[[float], str],
) -> Iterator[Finding]:
    """A number of each host against the least that a run can do with, and the least that is good."""
    values, fine = [], True
    for host in subject.hosts:
        value = value_of(host, _facts_of(subject, host))
        if value is None:
            continue
        values.append(value)
        least, good = limits(host)
        if value < good:
            fine = False
            text, mend = say(host, value)
            level: Level = "failure" if value < least else "warning"
            yield Finding(check=check, level=level, host=host.name, text=text, mend=mend)
    if values and fine:
        yield Finding(check=check, level="ok", text=say_ok(min(values)))


def disk(subject: Subject) -> Iterator[Finding]:
    """Room and leave to write, for temporary files everywhere, and for the run where rank 0 is."""
    wrong: list[Finding] = []
    first = subject.hosts[0]
    for host in subject.hosts:
        there = _facts_of(subject, host).disk
        if there and there.temporary_error:
            text = f"nothing can be written to {there.temporary}: {there.temporary_error}"
            mend = f"df {there.temporary}: free space there, or set TMPDIR"
            wrong.append(Finding(check="disk", level="failure", host=host.name, text=text, mend=mend))
    yield from wrong
    place = _facts_of(subject, first).disk
    if place is None:
        return
    text = ""
    level: Level = "failure"
    if place.error:
        text = f"rank 0 cannot write to {place.folder}: {place.error}"
    elif place.free < GOOD_DISK:
        text = f"{size(place.free)} free in {place.folder}; five checkpoints take up to {size(LEAST_DISK)}"
        level = "failure" if place.free < LEAST_DISK else "warning"
    if text:
        mend = "free space, or allow writing there; or train with another --run-dir"
        yield Finding(check=RUN_FOLDER, level=level, host=first.name, text=text, mend=mend)
    else:
        text = f"{size(place.free)} free in {place.folder}, which can be written"
        yield Finding(check=RUN_FOLDER, level="ok", text=text)


def clocks(subject: Subject) -> Iterator[Finding]:
    """Clocks that agree: times in logs can be compared, and files are not from the future."""
    offsets = {name: facts.clock for name, facts in subject.facts.items() if facts.clock}
    if len(offsets) < 2:
        return
    # Of two nobody knows which is right: this machine's is the measure.
    usual = statistics.median(offset for offset, _ in offsets.values()) if len(offsets) > 2 else 0.0
    wrong = False
    for host, (offset, doubt) in offsets.items():
        off = offset - usual
        if abs(off) > CLOCK_SECONDS + doubt:
            wrong = True
            text = f"its clock is {seconds(abs(off))} {'ahead' if off > 0 else 'behind'}"
            yield Finding(check="clocks", level="warning", host=host, text=text, mend="timedatectl set-ntp true")
    if not wrong:
        most = max(abs(offset - usual) + doubt for offset, doubt in offsets.values())
        yield Finding(check="clocks", level="ok", text=f"{some_hosts(list(offsets))}: within {seconds(most)}")


def data(subject: Subject) -> Iterator[Finding]:
    """The data set is whole where it is, and the same one; hosts without it are sent rank 0's."""
    layout = layout_of(subject.dataset)
    if layout is None:
        yield Finding(check="data", level="ok", text=f"{subject.dataset}: not looked at")
        return
    first = subject.hosts[0].name
    sets = {
        host.name: facts.data for host in subject.hosts if "data" not in (facts := _facts_of(subject, host)).missing
    }
    have = {name: found for name, found in sets.items() if found}
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="data", level=level, host=host, text=text, mend=mend))

    damaged = {name: text for name, found_set in have.items() if (text := _damage(found_set, layout))}
    for name, text in damaged.items():
        how = "restore it, or move its folder away" if name == first else "remove its folder: rank 0 sends it anew"
        found(name, "failure", text, how)
    whole = {name: found_set for name, found_set in have.items() if name not in damaged}
    if first in whole:
        for name, found_set in whole.items():
            files = [f for f in layout.files if found_set.files[f].sha256 != whole[first].files[f].sha256]
            if files:
                text = f"{found_set.folder}/{files[0]} is not that of {first}"
                found(name, "failure", text, "remove its folder, or train with --data-source rank0")
    if first in sets and first not in have and first in subject.facts and subject.dataset != "synthetic":
        text = f"no {layout.title} in {subject.data_dir} of rank 0's host: a run would download it"
        text += ", or train on the synthetic set" * (subject.dataset == "auto")
        found(first, "warning", text, "name its folder: --data-dir")
    yield from wrong
    if sets and not wrong:
        lacking = [name for name in sets if name not in have and name in subject.facts]
        if first in have:
            text = f"complete in {have[first].folder}"
            text += f"; {listed(lacking)} will be sent it" * bool(lacking) + " on all hosts" * (
                not lacking and len(sets) > 1
            )
        else:
            text = "synthetic: it will be drawn" * (subject.dataset == "synthetic")
        yield Finding(check="data", level="ok", text=text or "not looked at")


def _damage(found: Data, layout: Layout) -> str:
    for name in layout.files:
        file = found.files.get(name)
        path = f"{found.folder}/{name}"
        if file is None:
            return f"{path} is missing, or cannot be read"
        if file.bytes != layout.bytes_of(name):
            return f"{path} has {file.bytes:,} bytes instead of {layout.bytes_of(name):,}"
        if file.wrong_label_at >= 0:
            return f"{path} is damaged: the label of record {file.wrong_label_at} is none"
    return ""


def _facts_of(subject: Subject, host: Host) -> HostFacts:
    return subject.facts.get(host.name, HostFacts())


def computes_on_gpus(facts: HostFacts) -> bool:
    """Whether ranks would take a host's GPUs."""
    build = facts.versions.horovod if facts.versions else None
    return bool(facts.gpus) and build is not None and "NCCL" in build.features
