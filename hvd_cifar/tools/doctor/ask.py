"""Asks all hosts at once for their facts, and tests the connections between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cifar.launch.cluster.network import Network, NoWay, addresses, asked, candidates, try_out
from hvd_cifar.launch.cluster.program import Participants, Program
from hvd_cifar.tools.doctor.facts import GROUPS, HostFacts

PROBE = Path(__file__).with_name("probe.py")

Silent = tuple[str, str]  # what is wrong with a host that does not answer, and what to do


@dataclass(frozen=True)
class Answers:
    """The facts of the hosts that answer, what is wrong with the others, and the network between them.

    `network`: None without a common network, or with one host; `blocked`: connections that fail on it.
    """

    facts: dict[str, HostFacts]
    silent: dict[str, Silent]
    network: Network | None
    blocked: list[NoWay]


def ask_all(participants: Participants, questions: Mapping[str, Any], seconds: float) -> Answers:
    """Ask all hosts at once.

    Args:
        participants: the hosts.
        questions: what `probe.py` reads.
        seconds: the time limit for a host's facts.
    """
    hosts = participants.hosts
    programs: list[Program] = []
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        try:
            text = PROBE.read_text()
            programs += [Program(participants, host, text, seconds) for host in hosts]
            listening = pool.map(lambda program: _listen(program, questions), programs)
            network, blocked = _network_of(participants) if len(hosts) > 1 else (None, [])
            answers = dict(zip(hosts, listening, strict=True))
        finally:  # The pool's exit waits for its threads, which wait for the programs: end these first.
            for program in programs:
                program.end()
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, HostFacts)}
    silent = {host: answer for host, answer in answers.items() if not isinstance(answer, HostFacts)}
    return Answers(facts, silent, network, blocked)


def _listen(program: Program, questions: Mapping[str, Any]) -> HostFacts | Silent:
    # The first line says that the program has started: the start's seconds stay out of the clock's error below.
    if program.hear(b"{") is None:
        return program.why()
    sent = time.time()
    program.say(questions)
    clock = program.hear(b"{")
    received = time.time()
    if clock is None:
        return program.why()
    found: dict[str, Any] = {"clock": (clock["facts"] - (sent + received) / 2, (received - sent) / 2)}
    missing: dict[str, str] = {}
    for name in GROUPS:
        answer = program.hear(b"{")
        if answer is None:
            missing |= dict.fromkeys(GROUPS[GROUPS.index(name) :], "no answer in time" if program.late else "it ended")
            break
        if "error" in answer:
            missing[name] = answer["error"]
        else:
            found[name] = answer["facts"]
    return HostFacts(**found, missing=missing)


def _network_of(participants: Participants) -> tuple[Network | None, list[NoWay]]:
    """The network between the hosts that answer, or None; and connections that fail on it."""
    with asked(participants) as (probes, _):
        reports = {host: probe.report for host, probe in probes.items()}
        found = candidates(reports, addresses(probes)) if len(probes) > 1 else []
        if not found:
            return None, []
        faults = try_out(found, probes)
    best = min(range(len(found)), key=lambda number: len(faults[number]))
    return found[best], faults[best]
