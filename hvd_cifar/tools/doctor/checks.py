"""The doctor's checks: one list, each a pure function of all that is known.

A failure means that a run would fail. A warning means that it would be slow, or give surprising results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from hvd_cifar.tools.doctor.facts import Subject

MIB, GIB, MBIT = 2**20, 2**30, 1e6 / 8
# A training rank takes about 600 MiB that it shares with no other.
LEAST_MEMORY, GOOD_MEMORY = 600 * MIB, GIB
# What a rank of Open MPI needs in /dev/shm; NCCL needs more.
SHM_OF_A_RANK, SHM_OF_A_GPU = 4 * MIB + 4096, 16 * MIB
# All-reduces are slow below this share of the slowest card's speed, and below this bandwidth between hosts.
SLOW_OF_CARD, SLOW_BYTES_PER_SECOND = 0.05, 100e6 / 8
SET_UP, SET_UP_ALL = "./run.sh setup", "./run.sh setup --hostfile FILE"
NAMES_SHOWN = 3
HALVES = "the doctor on half of the hosts (-H), and so on, finds the one at fault"


class Finding(NamedTuple):
    """What a check found, on one host ("": on all, or between them); `remedy`: what to do."""

    level: Literal["ok", "warning", "failure"]
    host: str
    text: str
    remedy: str = ""
    check: str = ""


Check = Callable[[Subject], Iterator[Finding]]


def findings(subject: Subject, checks: Mapping[str, Check], hosts_option: str = "") -> list[Finding]:
    """What the checks find, in their order: what is wrong, or where nothing is, what is fine.

    `hosts_option`: names the hosts in advice, such as -H a:2,b:2.
    """
    found, option = [], hosts_option or "--hostfile FILE"
    for name, check in checks.items():
        every = list(check(subject)) or [_ok()]
        told = [one for one in every if one.level != "ok"] or every
        found += [one._replace(check=name, remedy=one.remedy.replace("--hostfile FILE", option)) for one in told]
    return found


def ssh(subject: Subject) -> Iterator[Finding]:
    """Every host answers, and has an environment like this one."""
    for host, (what, remedy) in subject.silent.items():
        yield Finding("failure", host, what, remedy)


def network(subject: Subject) -> Iterator[Finding]:
    """All hosts are on a common network, on which each connects to every other one at any port, all equally fast."""
    if subject.no_network:
        yield Finding("failure", "", *subject.no_network.rsplit(": ", 1))
    elif subject.network:
        fastest = max(card.speed for card in subject.network.cards.values())
        for host, card in subject.network.cards.items():
            if 0 < card.speed < fastest:
                slow = f"its card {card.name} runs at {_speed(card.speed * MBIT)}, others at {_speed(fastest * MBIT)}"
                yield Finding("warning", host, slow, f"ethtool {card.name}: try another cable, or port of the switch")
        yield _ok(f"ranks will use {subject.network.subnet} ({', '.join(subject.network.card_names)})")
    elif subject.silent:
        yield Finding("warning", "", "not tested", "correct ssh first")


def versions(subject: Subject) -> Iterator[Finding]:
    """Every host has this machine's Python, packages for arithmetic and messages, and code of this project."""
    mine = subject.facts.get(subject.here)
    if mine is None:
        return
    for host, there in subject.facts.items():
        different = [
            f"{name} {there.versions[name]}, not {version}" if name in there.versions else f"no {name}"
            for name, version in mine.versions.items()
            if there.versions.get(name) != version
        ]
        if different:
            yield Finding("failure", host, _listed(different), SET_UP_ALL)
        if there.code != mine.code:
            remedy = f"{SET_UP_ALL}; where it refuses: update that checkout, or remove it"
            yield Finding("failure", host, "its files of this project differ from those here", remedy)
    yield _ok(", ".join(f"{name} {version}" for name, version in mine.versions.items()))


def gpus(subject: Subject) -> Iterator[Finding]:
    """Each rank has a GPU, where there are GPUs that the environment can use."""
    some_compute = any(facts.computes_on_gpus for _, facts in subject.known)
    for host, facts in subject.known:
        count = len(facts.gpus)
        if count and not facts.is_for_gpus:
            remedy = f"{SET_UP_ALL if len(subject.hosts) > 1 else SET_UP} --gpu"
            yield Finding("warning", host.name, f"{counted(count, 'GPU')}, but the environment is for the CPU", remedy)
        elif count and host.slots > count:
            text = f"{host.slots} slots, but {counted(count, 'GPU')}"
            yield Finding("failure", host.name, text, f"give it slots={count}")
        elif not count and facts.is_for_gpus:
            text = "there is no GPU" + (", unlike on other hosts" if some_compute else ": the CPU computes")
            remedy = f"see nvidia-smi -L and CUDA_VISIBLE_DEVICES there; for the CPU: {SET_UP} --cpu"
            yield Finding("failure" if some_compute else "warning", host.name, text, remedy)
    yield _ok("" if some_compute else "none: the CPU computes")


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """A host's ranks can exchange messages: /dev/shm has room."""
    for host, facts in subject.known:
        on_gpus = facts.computes_on_gpus
        need = host.slots * (SHM_OF_A_GPU if on_gpus else SHM_OF_A_RANK)
        if facts.shm < need and host.slots > 1:  # one rank alone shares no memory
            text = f"{_size(facts.shm)} free in /dev/shm, but {host.slots} ranks need {_size(need)}: "
            text += "NCCL would fail" if on_gpus else "MPI would use TCP, which is slower"
            remedy = "mount -o remount,size=1G /dev/shm; in a container: docker run --shm-size=1g"
            yield Finding("failure" if on_gpus else "warning", host.name, text, remedy)


def memory(subject: Subject) -> Iterator[Finding]:
    """Each rank has enough memory."""
    for host, facts in subject.known:
        free = facts.memory / host.slots
        if free < GOOD_MEMORY:
            text = f"{_size(free)} free for each of {counted(host.slots, 'rank')}; a rank needs about "
            remedy = "end other programs there, or give it fewer slots"
            text += _size(LEAST_MEMORY)
            yield Finding("failure" if free < LEAST_MEMORY else "warning", host.name, text, remedy)


def disk(subject: Subject) -> Iterator[Finding]:
    """Each host can write temporary files."""
    for host, facts in subject.known:
        if facts.temporary_error:
            text = f"nothing can be written to {facts.temporary}: {facts.temporary_error}"
            yield Finding("failure", host.name, text, f"df {facts.temporary}: free space there, or set TMPDIR")


def job(subject: Subject) -> Iterator[Finding]:
    """The small job succeeded, with right sums."""
    done = subject.job
    if done is None:
        yield Finding("warning", "", "not started: a run would fail", "correct the failures first")
        return
    if done.failure:
        remedy = "./run.sh train --max-steps 1 shows more; if the hosts are only slow: --job-timeout"
        yield Finding("failure", "", done.failure, remedy)
    elif done.wrong_values:
        text = f"{done.wrong_values:,} wrong values in all-reduces over all ranks: training would go wrong"
        remedy = f"rm -r .venv, then {SET_UP}"
        if subject.network:
            remedy += f"; if that does not help, {HALVES}"
        yield Finding("failure", "", text, remedy)
    elif subject.network:
        promised = min((card.speed for card in subject.network.cards.values() if card.speed), default=0) * MBIT
        if done.bytes_per_second < max(SLOW_OF_CARD * promised, SLOW_BYTES_PER_SECOND):
            cards = f"; the cards have {_speed(promised)}" if promised else ""
            text = f"all-reduces are slow: {_speed(done.bytes_per_second)}{cards}"
            yield Finding("warning", "", text, HALVES)
    rate = f", {_speed(done.bytes_per_second)}" if done.bytes_per_second else ""
    yield _ok(f"{done.how}; sums are right{rate} ({done.seconds:.0f} s)")


OF_HOSTS = {
    "ssh": ssh,
    "network": network,
    "versions": versions,
    "GPUs": gpus,
    "shared memory": shared_memory,
    "memory": memory,
    "disk": disk,
}
CHECKS = {**OF_HOSTS, "job": job}


def counted(number: int, what: str) -> str:
    """A number with its noun, in the plural unless it is 1."""
    return f"{number} {what}{'s' * (number != 1)}"


def _ok(text: str = "") -> Finding:
    return Finding("ok", "", text)


def _listed(texts: Sequence[str]) -> str:
    """The first texts, and the number of the others."""
    more = len(texts) - NAMES_SHOWN
    return ", ".join(texts[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _size(number: float) -> str:
    return _scaled(number, (("GiB", GIB), ("MiB", MIB), ("KiB", 2**10)))


def _speed(bytes_per_second: float) -> str:
    return _scaled(bytes_per_second * 8, (("Gbit/s", 1e9), ("Mbit/s", 1e6)))


def _scaled(number: float, units: Sequence[tuple[str, float]]) -> str:
    """A number in the first unit that it reaches, else in the last, with three digits at least."""
    unit, factor = next((one for one in units if number >= one[1]), units[-1])
    return f"{number / factor:.{0 if number >= 100 * factor else 1}f} {unit}"
