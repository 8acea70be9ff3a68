"""Findings on each host's resources for ranks: cores, GPUs, memory, files, clock, data set."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator

from hvd_cifar.data.cifar import Layout
from hvd_cifar.data.source import layout_of
from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.runtime import devices
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

# A training rank takes about 600 MiB that it shares with no other (docs/notebook/2026-11-23-performance.md).
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, 1 * GIB
# What a rank of Open MPI needs in /dev/shm; NCCL needs more.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# A rank opens about 50 files (TensorFlow, Horovod, Open MPI), and a few for each other rank.
LEAST_FILES, FILES_PER_RANK, GOOD_FILES = 64, 4, 512
# Five checkpoints of the largest model are about 100 MiB.
LEAST_DISK, GOOD_DISK = 100 * MIB, 1 * GIB
CLOCK_SECONDS = 2.0
NEEDED_FLAGS = ("avx", "f16c", "fma")  # TensorFlow needs the first; Horovod is built with those that set-up finds
LET_READ = "docker run --cap-add=SYS_PTRACE, or: export OMPI_MCA_btl_vader_single_copy_mechanism=none"
RUN_FOLDER = "run folder"


def cpus(subject: Subject) -> Iterator[Finding]:
    """Each rank has a core, unless GPUs compute; the processors have the same instructions."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str) -> None:
        wrong.append(Finding(check="cores", level=level, host=host, text=text, remedy=remedy))

    known = {host.name: cpu for host in subject.hosts if (cpu := _facts_of(subject, host).cpu)}
    flags = {name: set(cpu.flags) for name, cpu in known.items()}
    for host in subject.hosts:
        cpu = known.get(host.name)
        if cpu and host.slots > cpu.usable and not computes_on_gpus(_facts_of(subject, host)):
            text = f"{host.slots} slots share {counted(cpu.usable, 'core')}: results are right, but slow"
            found(host.name, "warning", text, f"give it slots={cpu.usable}")
    all_flags = set().union(*flags.values())
    for name, have in flags.items():
        lacking = [flag for flag in NEEDED_FLAGS if flag in all_flags - have]
        if lacking:
            text = f"its processor ({known[name].model}) lacks {', '.join(lacking)}, which others have"
            found(
                name,
                "failure",
                text,
                "leave it out: programs built for the others crash there (illegal instruction)",
            )
    without = [name for name, have in flags.items() if have.isdisjoint(devices.BFLOAT16_FLAGS)]
    if without and len(without) < len(flags):
        text = f"no bfloat16 instructions on {listed(without)}: all ranks would compute in float32"
        found(without[0] if len(without) == 1 else "", "warning", text, "leave those hosts out, or set --precision")
    yield from wrong
    if known and not wrong:
        shown = [
            f"{counted(known[host.name].usable, 'core')} for {counted(host.slots, 'rank')}"
            for host in subject.hosts
            if host.name in known
        ]
        yield Finding(check="cores", level="ok", text=listed(list(dict.fromkeys(shown))))


def gpus(subject: Subject) -> Iterator[Finding]:
    """Each rank has a GPU, where there are GPUs; all hosts have the same driver."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str) -> None:
        wrong.append(Finding(check="GPUs", level=level, host=host, text=text, remedy=remedy))

    known = {host.name: facts for host in subject.hosts if (facts := _facts_of(subject, host)).gpus is not None}
    counts = {name: len(facts.gpus or ()) for name, facts in known.items()}
    for host in subject.hosts:
        count = counts.get(host.name, 0)
        if not count:
            continue
        if not computes_on_gpus(known[host.name]):
            text = f"{counted(count, 'GPU')}, but the environment is for the CPU"
            found(host.name, "warning", text, f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu")
        elif host.slots > count:
            text = f"{host.slots} slots, but {counted(count, 'GPU')}"
            found(host.name, "failure", text, f"give it slots={count}")
    without = [name for name, count in counts.items() if not count]
    if without and any(computes_on_gpus(facts) for facts in known.values()):
        text = f"nvidia-smi lists no GPU on {listed(without)}, unlike on the others"
        found(without[0] if len(without) == 1 else "", "failure", text, "run nvidia-smi there, and see its message")
    if known and all(map(is_for_gpus, known.values())) and not any(counts.values()) and not subject.hides_gpus:
        text = "the environment is for GPUs, but nvidia-smi lists none: ranks would compute on the CPU"
        found("", "warning", text, f"load the driver (nvidia-smi shows its message), or {SET_UP} --cpu")
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
    """A host's ranks can exchange messages: /dev/shm has room, and they can read each other's memory."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str) -> None:
        wrong.append(Finding(check="shared memory", level=level, host=host, text=text, remedy=remedy))

    known = {host.name: memory for host in subject.hosts if (memory := _facts_of(subject, host).memory)}
    for host in subject.hosts:
        memory = known.get(host.name)
        if memory is None or host.slots == 1:  # one rank alone shares no memory
            continue
        on_gpus = computes_on_gpus(_facts_of(subject, host))
        need = host.slots * (SHM_OF_A_GPU if on_gpus else SHM_OF_A_RANK)
        if memory.shm_free < need:
            text = f"{size(memory.shm_free)} free in /dev/shm, but {host.slots} ranks need {size(need)}: "
            text += "NCCL would fail" if on_gpus else "MPI would use TCP, which is slower"
            remedy = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            found(host.name, "failure" if on_gpus else "warning", text, remedy)
        if memory.attach_error and not subject.single_copy_off:
            # Open MPI 4.1.8 then copies through /dev/shm, with an error for every message.
            text = f"ranks cannot read each other's memory ({memory.attach_error}): MPI prints 'Read -1, expected'"
            found(host.name, "warning", text, LET_READ)
    yield from wrong
    if known and not wrong:
        free = size(min(memory.shm_free for memory in known.values()))
        attach = " ranks can read each other's memory" if not any(m.attach_error for m in known.values()) else ""
        least = "at least " * (len(known) > 1)
        yield Finding(
            check="shared memory", level="ok", text=f"{least}{free} free in /dev/shm{';' * bool(attach)}{attach}"
        )


def memory(subject: Subject) -> Iterator[Finding]:
    """Each rank has enough memory."""
    yield from _enough(
        subject,
        "memory",
        lambda host, facts: facts.memory.available / host.slots if facts.memory else None,
        lambda host: (LEAST_MEMORY, GOOD_MEMORY),
        lambda host, value: (
            f"{size(value)} free for each of {counted(host.slots, 'rank')}; a rank needs about {size(LEAST_MEMORY)}",
            "end other programs there, or give it fewer slots",
        ),
        lambda least: f"at least {size(least)} free for each rank",
    )


def open_files(subject: Subject) -> Iterator[Finding]:
    """A process may open enough files and connections; ssh sets this limit for ranks."""
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
            "echo '* soft nofile 65536' > /etc/security/limits.d/hvd_cifar.conf, then log in again",
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
    """Compare a number of each host with two limits: below the first a run would fail, below the second be slow."""
    values, fine = [], True
    for host in subject.hosts:
        value = value_of(host, _facts_of(subject, host))
        if value is None:
            continue
        values.append(value)
        least, good = limits(host)
        if value < good:
            fine = False
            text, remedy = say(host, value)
            level: Level = "failure" if value < least else "warning"
            yield Finding(check=check, level=level, host=host.name, text=text, remedy=remedy)
    if values and fine:
        yield Finding(check=check, level="ok", text=say_ok(min(values)))


def disk(subject: Subject) -> Iterator[Finding]:
    """The folder for temporary files is writable on each host. Rank 0 can write to the run's folder, which has room."""
    wrong: list[Finding] = []
    first = subject.hosts[0]
    for host in subject.hosts:
        there = _facts_of(subject, host).disk
        if there and there.temporary_error:
            text = f"nothing can be written to {there.temporary}: {there.temporary_error}"
            remedy = f"df {there.temporary}: free space there, or set TMPDIR"
            wrong.append(Finding(check="disk", level="failure", host=host.name, text=text, remedy=remedy))
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
        remedy = "free space, or allow writing there; or choose another --run-dir"
        yield Finding(check=RUN_FOLDER, level=level, host=first.name, text=text, remedy=remedy)
    else:
        text = f"{size(place.free)} free in {place.folder}, which is writable"
        yield Finding(check=RUN_FOLDER, level="ok", text=text)


def clocks(subject: Subject) -> Iterator[Finding]:
    """Clocks agree: times in logs can be compared, and no file is from the future."""
    offsets = {name: facts.clock for name, facts in subject.facts.items() if facts.clock}
    if len(offsets) < 2:
        return
    # Two clocks have no majority, so this machine's is the reference.
    usual = statistics.median(offset for offset, _ in offsets.values()) if len(offsets) > 2 else 0.0
    wrong = False
    for host, (offset, doubt) in offsets.items():
        off = offset - usual
        if abs(off) > CLOCK_SECONDS + doubt:
            wrong = True
            text = f"its clock is {seconds(abs(off))} {'ahead' if off > 0 else 'behind'}"
            yield Finding(check="clocks", level="warning", host=host, text=text, remedy="timedatectl set-ntp true")
    if not wrong:
        most = max(abs(offset - usual) + doubt for offset, doubt in offsets.values())
        yield Finding(check="clocks", level="ok", text=f"{some_hosts(list(offsets))}: within {seconds(most)}")


def data(subject: Subject) -> Iterator[Finding]:
    """Each copy of the data set is complete, and the same. Rank 0 sends it to hosts without one."""
    layout = layout_of(subject.dataset)
    if layout is None:
        yield Finding(check="data", level="ok", text=f"{subject.dataset}: not examined")
        return
    first = subject.hosts[0].name
    sets = {
        host.name: facts.data for host in subject.hosts if "data" not in (facts := _facts_of(subject, host)).missing
    }
    have = {name: found for name, found in sets.items() if found}
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, remedy: str) -> None:
        wrong.append(Finding(check="data", level=level, host=host, text=text, remedy=remedy))

    damaged = {name: text for name, found_set in have.items() if (text := _damage(found_set, layout))}
    for name, text in damaged.items():
        how = "restore it, or move its folder away" if name == first else "remove its folder: rank 0 sends it again"
        found(name, "failure", text, how)
    whole = {name: found_set for name, found_set in have.items() if name not in damaged}
    if first in whole:
        for name, found_set in whole.items():
            files = [f for f in layout.files if found_set.files[f].sha256 != whole[first].files[f].sha256]
            if files:
                text = f"{found_set.folder}/{files[0]} differs from that of {first}"
                found(name, "failure", text, "remove its folder, or train with --data-source rank0")
    if first in sets and first not in have and first in subject.facts and subject.dataset != "synthetic":
        text = f"rank 0's host has no {layout.title} in {subject.data_dir}: a run would download it"
        text += ", or train on the synthetic set" * (subject.dataset == "auto")
        found(first, "warning", text, "if it is elsewhere: --data-dir")
    yield from wrong
    if sets and not wrong:
        lacking = [name for name in sets if name not in have and name in subject.facts]
        if first in have:
            text = f"complete in {have[first].folder}"
            text += f"; rank 0 will send it to {listed(lacking)}" * bool(lacking) + " on all hosts" * (
                not lacking and len(sets) > 1
            )
        else:
            text = "synthetic: a run generates it" * (subject.dataset == "synthetic")
        yield Finding(check="data", level="ok", text=text or "not examined")


def _damage(found: Data, layout: Layout) -> str:
    for name in layout.files:
        file = found.files.get(name)
        path = f"{found.folder}/{name}"
        if file is None:
            return f"{path} is missing or not readable"
        if file.bytes != layout.bytes_of(name):
            return f"{path} has {file.bytes:,} bytes instead of {layout.bytes_of(name):,}"
        if file.wrong_label_at >= 0:
            return f"{path} is damaged: record {file.wrong_label_at} has no valid label"
    return ""


def _facts_of(subject: Subject, host: Host) -> HostFacts:
    return subject.facts.get(host.name, HostFacts())


def computes_on_gpus(facts: HostFacts) -> bool:
    """Whether ranks compute on a host's GPUs."""
    return bool(facts.gpus) and is_for_gpus(facts)


def is_for_gpus(facts: HostFacts) -> bool:
    """Whether a host's environment is for GPUs."""
    build = facts.versions.horovod if facts.versions else None
    return build is not None and "NCCL" in build.features
