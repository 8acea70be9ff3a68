"""Findings on the small job: whether it succeeded, whether sums are right, how fast each link is."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from hvd_cifar.tools.doctor.facts import Link, Subject
from hvd_cifar.tools.doctor.finding import SET_UP, Finding, counted, listed, ranged, seconds, size, speed
from hvd_cifar.tools.doctor.machine import LET_READ

# A link is slow below these: a share of the other links' median, a share of the card's speed, a bandwidth.
SLOW_OF_OTHERS, SLOW_OF_CARD, SLOW_BYTES_PER_SECOND = 0.25, 0.1, 100e6 / 8
BUSY = 1.5  # processes per core
LATE_OF_OTHERS, LATE_SECONDS = 10.0, 5e-3
# The largest relative difference of a step's loss or update from the CPU's in float32. In `fast` rounding alone gives
# 0.24 in bfloat16 on a CPU. On an H100 it gives 0.015 in float32 (which GPUs multiply in TF32), 0.17 in bfloat16 and
# 0.084 in float16.
TOLERANCES = {"float32": 0.1, "mixed_bfloat16": 0.5, "mixed_float16": 0.1}
# TensorFlow asks for memory in growing steps; CUDA and its libraries hold some of their own.
MEMORY_FACTOR, MEMORY_OF_CONTEXT = 4, 3 * 2**30


def job(subject: Subject) -> Iterator[Finding]:
    """The small job succeeded, with right sums."""
    done = subject.job
    if done is None:
        yield Finding(check="job", level="warning", text=f"not started: {subject.no_job}")
        return
    left_out = [host.name for host in subject.hosts if host.name not in done.ranks]
    if left_out:
        text = f"it ran without {listed(left_out)}: see the failures above"
        yield Finding(check="job", level="warning", text=text)
    read_failed = next((line for line in done.complaints if "Read -1, expected" in line), "")
    if read_failed:
        yield Finding(check="job", level="warning", text=f"a rank printed: {read_failed}", remedy=LET_READ)
    if done.failure:
        pending = listed([f"{a} and {b}" for a, b in done.pending])
        text = done.failure + f"; it hung between {pending}" * bool(pending) + _busy(subject, list(done.ranks))
        remedy = "./run.sh train --max-steps 1 shows more; if the hosts are only slow: --job-timeout"
        remedy = f"let all ports through between {pending}" if pending else remedy
        yield Finding(check="job", level="failure", text=text, remedy=remedy)
        return
    if done.wrong_values:
        text = f"{done.wrong_values:,} wrong values in an all-reduce over all ranks: training would go wrong"
        yield Finding(check="job", level="failure", text=text, remedy=f"rm -r .venv, then {SET_UP}")
    else:
        yield Finding(check="job", level="ok", text=f"{done.how}; sums are right ({done.seconds:.0f} s)")


def first_steps(subject: Subject) -> Iterator[Finding]:
    """On GPUs each preset's first step matches the CPU's. Each rank has its own GPU, and only the memory it needs."""
    done = subject.job
    if done is None or done.failure or not done.first_steps:
        return
    wrong = [step for step in done.first_steps if step.difference > TOLERANCES[step.precision]]
    for step in wrong:
        text = f"{step.preset} in {step.precision}: rank {step.rank}'s training step differs from the CPU's by "
        text += f"{step.difference:.2g}, more than {TOLERANCES[step.precision]:g}"
        remedy = "another driver, or --precision float32; send us ./run.sh doctor --json"
        yield Finding(check="first steps", level="failure", host=done.hosts[step.rank], text=text, remedy=remedy)
    if not wrong:
        worst = max(done.first_steps, key=lambda step: step.difference / TOLERANCES[step.precision])
        text = f"{len(done.first_steps)} training steps match the CPU's; nearest to its limit: {worst.preset} in "
        text += f"{worst.precision} ({worst.difference:.2g} of {TOLERANCES[worst.precision]:g})"
        yield Finding(check="first steps", level="ok", text=text)
    sharing = [(host, gpu.uuid) for host, gpu in zip(done.hosts, done.gpus, strict=True) if gpu.uuid]
    for rank, (host, gpu) in enumerate(zip(done.hosts, done.gpus, strict=True)):
        if "+" in gpu.uuid or sharing.count((host, gpu.uuid)) > 1:
            text = f"the driver shows rank {rank} on {gpu.uuid}; each rank needs a GPU of its own"
            yield Finding(check="first steps", level="failure", host=host, text=text, remedy=SET_UP)
        elif gpu.used > MEMORY_FACTOR * gpu.peak + MEMORY_OF_CONTEXT:
            text = f"rank {rank} holds {size(gpu.used)} of its GPU for {size(gpu.peak)} of tensors"
            remedy = "if TF_FORCE_GPU_ALLOW_GROWTH=false is set, unset it"
            yield Finding(check="first steps", level="warning", host=host, text=text, remedy=remedy)


def links(subject: Subject) -> Iterator[Finding]:
    """Sums are right between all hosts; no link is much slower than the others, or than its card."""
    done = subject.job
    if done is None or done.failure or not done.links:
        return
    wrong = [link for link in done.links if link.wrong_values]
    for link in wrong:
        text = f"{link.wrong_values:,} wrong values in an all-reduce {_between(link)}"
        remedy = "ethtool -S CARD: errors? Then try another cable, or card" if link.a != link.b else SET_UP
        yield Finding(check="links", level="failure", host=link.a if link.a == link.b else "", text=text, remedy=remedy)
    between = [link for link in done.links if link.a != link.b]
    slow = [link for link in between if _why_slow(link, between, subject)]
    named = _hosts_behind(slow, between)
    for host in named:
        mine = [link for link in slow if host in (link.a, link.b)]
        text = f"all its links are slow: {_speeds(mine)}"
        rest = [link for link in between if link not in mine]
        text += f"; the others: {_speeds(rest)}" if rest else ""
        text += _busy(subject, [host])
        yield Finding(check="links", level="warning", host=host, text=text, remedy=_remedy_of_link(subject, host))
    for link in slow:
        if link.a not in named and link.b not in named:
            text = f"the link {_between(link)} is slow: {_speeds([link])}{_why_slow(link, between, subject)}"
            text += _busy(subject, [link.a, link.b])
            yield Finding(check="links", level="warning", text=text, remedy=_remedy_of_link(subject, link.b))
    if not wrong and not slow:
        measured = f"{len(between)} of {counted(done.pairs, 'pair')} of hosts" if len(between) < done.pairs else ""
        shown = measured or (f"every pair of hosts is right ({len(between)})" if between else "ranks of one host only")
        yield Finding(check="links", level="ok", text=f"{shown}; {_speeds(between or list(done.links))}")


def _why_slow(link: Link, all_links: Sequence[Link], subject: Subject) -> str:
    """Why a link counts as slow; "": it does not."""
    others = [other for other in all_links if other is not link]
    if others:
        usual = statistics.median(other.bytes_per_second for other in others)
        if link.bytes_per_second < SLOW_OF_OTHERS * usual:
            return f"; the others' median is {speed(usual)}"
        latency = statistics.median(other.seconds for other in others)
        if link.seconds > max(LATE_SECONDS, LATE_OF_OTHERS * latency):
            return f"; the others' median is {seconds(latency)}"
    cards = subject.network.cards if subject.network else {}
    promised = min((cards[host].speed for host in (link.a, link.b) if host in cards), default=0) * 1e6 / 8
    if promised and link.bytes_per_second < SLOW_OF_CARD * promised:
        return f"; the cards have {speed(promised)}"
    return "; too slow for any training" if link.bytes_per_second < SLOW_BYTES_PER_SECOND else ""


def _hosts_behind(slow: Sequence[Link], all_links: Sequence[Link]) -> list[str]:
    """Hosts whose links are all slow, unlike those of other hosts: the host is at fault, not the network."""
    found = []
    for host in sorted({host for link in all_links for host in (link.a, link.b)}):
        mine = [link for link in all_links if host in (link.a, link.b)]
        rest = [link for link in all_links if link not in mine]
        if len(mine) < 2 or not rest or not all(link in slow for link in mine):
            continue
        usual = statistics.median(link.bytes_per_second for link in rest)
        if all(link.bytes_per_second < SLOW_OF_OTHERS * usual for link in mine) or not any(
            link in slow for link in rest
        ):
            found.append(host)
    return found


def _busy(subject: Subject, names: Sequence[str]) -> str:
    """Another reason for slow links: busy cores on these hosts."""
    cpus = {name: facts.cpu for name, facts in subject.facts.items() if name in names and facts.cpu}
    busy = [f"{cpu.load:.0f} on {name}'s {cpu.usable}" for name, cpu in cpus.items() if cpu.load > BUSY * cpu.usable]
    return f"; busy cores slow it (load {', '.join(busy)} cores)" if busy else ""


def _remedy_of_link(subject: Subject, host: str) -> str:
    card = subject.network.cards.get(host) if subject.network else None
    return (
        f"ethtool -S {card.name if card else 'CARD'} on {host}: errors? Then try another cable, or port of the switch"
    )


def _between(link: Link) -> str:
    within = f"within {link.a} (ranks {link.ranks[0]} and {link.ranks[1]})"
    return f"between {link.a} and {link.b}" if link.a != link.b else within


def _speeds(links: Sequence[Link]) -> str:
    """The ranges of the links' bandwidth and latency."""
    slowest, fastest = min(links, key=_fast), max(links, key=_fast)
    fast = [speed(slowest.bytes_per_second), speed(fastest.bytes_per_second)]
    late = [seconds(min(links, key=_late).seconds), seconds(max(links, key=_late).seconds)]
    return f"{ranged(fast)}, {ranged(late)}"


def _late(link: Link) -> float:
    return link.seconds


def _fast(link: Link) -> float:
    return link.bytes_per_second
