"""Checks of the small job's outcome: whether it succeeded, whether sums are right, how fast each link is."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence

from hvd_cifar.tools.doctor.facts import Link, Subject
from hvd_cifar.tools.doctor.finding import SET_UP, Finding, counted, listed, ranged, seconds, speed

# A link is slow below these: a share of the other links' median, a share of the card's speed, a bandwidth.
SLOW_OF_OTHERS, SLOW_OF_CARD, SLOW_BYTES_PER_SECOND = 0.25, 0.1, 100e6 / 8
LATE_OF_OTHERS, LATE_SECONDS = 10.0, 5e-3


def job(subject: Subject) -> tuple[list[Finding], str]:
    """The small job succeeded, with right sums."""
    done = subject.job
    if done is None:
        return [Finding("warning", "", f"not started: {subject.no_job}")], ""
    wrong = []
    if left_out := [host.name for host in subject.hosts if host.name not in done.ranks]:
        wrong.append(Finding("warning", "", f"it ran without {listed(left_out)}: see the failures above"))
    if refused := next((line for line in done.complaints if "Read -1, expected" in line), ""):
        # Ranks may not read each other's memory, as in a container; Open MPI then copies through /dev/shm.
        remedy = "docker run --cap-add=SYS_PTRACE, or: export OMPI_MCA_btl_vader_single_copy_mechanism=none"
        wrong.append(Finding("warning", "", f"a rank printed: {refused}", remedy))
    pending = listed([f"{a} and {b}" for a, b in done.pending])
    if done.failure and pending:
        remedy = f"let all ports through between {pending}"
        wrong.append(Finding("failure", "", f"{done.failure}; it hung between {pending}", remedy))
    elif done.failure:
        remedy = "./run.sh train --max-steps 1 shows more; if the hosts are only slow: --job-timeout"
        wrong.append(Finding("failure", "", done.failure, remedy))
    elif done.wrong_values:
        text = f"{done.wrong_values:,} wrong values in an all-reduce over all ranks: training would go wrong"
        wrong.append(Finding("failure", "", text, f"rm -r .venv, then {SET_UP}"))
    return wrong, f"{done.how}; sums are right ({done.seconds:.0f} s)"


def links(subject: Subject) -> tuple[list[Finding], str]:
    """Sums are right between all hosts; no link is much slower than the others, or than its card."""
    done = subject.job
    if done is None or not done.links:
        return [], ""
    found = []
    for link in done.links:
        if link.wrong_values:
            remedy = "ethtool -S CARD: errors? Then try another cable, or card" if link.a != link.b else SET_UP
            text = f"{link.wrong_values:,} wrong values in an all-reduce between {link.a} and {link.b}"
            found.append(Finding("failure", "", text, remedy))
    between = [link for link in done.links if link.a != link.b]
    slow = {link: why for link in between if (why := _why_slow(link, between, subject))}
    late = Counter[str]()  # a host's seconds per byte, over its slow links: where one host is at fault, it has most
    for link in slow:
        late.update({link.a: 1 / link.bytes_per_second, link.b: 1 / link.bytes_per_second})
    at_fault = {link: max(link.a, link.b, key=lambda host: late[host]) for link in slow}
    cards = subject.network.cards if subject.network else {}
    for host in sorted(set(at_fault.values())):
        mine = [link for link in slow if at_fault[link] == host]
        others = [link.b if link.a == host else link.a for link in mine]
        text = f"slow between it and {listed(others)}: {_speeds(mine)}; {slow[mine[0]]}"
        card = cards[host].name if host in cards else "CARD"
        remedy = f"ethtool -S {card} on {host}: errors? Then try another cable, or port of the switch"
        found.append(Finding("warning", host, text, remedy))
    measured = f"{len(between)} of {counted(done.pairs, 'pair')} of hosts" if len(between) < done.pairs else ""
    every = f"every pair of hosts is right ({len(between)})" if between else "ranks of one host only"
    return found, f"{measured or every}; {_speeds(between or done.links)}"


def _why_slow(link: Link, all_links: Sequence[Link], subject: Subject) -> str:
    """Why a link counts as slow; "": it does not."""
    others = [other for other in all_links if other is not link]
    if others:
        usual = statistics.median(other.bytes_per_second for other in others)
        if link.bytes_per_second < SLOW_OF_OTHERS * usual:
            return f"the others' median is {speed(usual)}"
        latency = statistics.median(other.seconds for other in others)
        if link.seconds > max(LATE_SECONDS, LATE_OF_OTHERS * latency):
            return f"the others' median is {seconds(latency)}"
    cards = subject.network.cards if subject.network else {}
    promised = min((cards[host].speed for host in (link.a, link.b) if host in cards), default=0) * 1e6 / 8
    if promised and link.bytes_per_second < SLOW_OF_CARD * promised:
        return f"the cards have {speed(promised)}"
    return "too slow for any training" if link.bytes_per_second < SLOW_BYTES_PER_SECOND else ""


def _speeds(some: Sequence[Link]) -> str:
    """The ranges of the links' bandwidth and latency."""
    fast, late = sorted(link.bytes_per_second for link in some), sorted(link.seconds for link in some)
    return f"{ranged([speed(fast[0]), speed(fast[-1])])}, {ranged([seconds(late[0]), seconds(late[-1])])}"
