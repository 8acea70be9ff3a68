"""Asks all hosts at once for their facts, and tests the connections between them."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hvd_cifar.launch.cluster.network import addresses, asked, candidates, try_out
from hvd_cifar.launch.cluster.program import Participants, Program
from hvd_cifar.tools.doctor.facts import GROUPS, HostFacts

PROBE = Path(__file__).with_name("probe.py")


def ask_all(participants: Participants, questions: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Ask all hosts at once. Returns the fields of `Subject` that the answers give.

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
            found = _network_of(participants) if len(hosts) > 1 else {}
            answers = dict(zip(hosts, listening, strict=True))
        finally:  # The pool's exit waits for its threads, which wait for the programs: end these first.
            for program in programs:
                program.end()
    facts = {host: answer for host, answer in answers.items() if isinstance(answer, HostFacts)}
    return {"facts": facts, "silent": {host: answers[host] for host in hosts if host not in facts}, **found}


def _listen(program: Program, questions: Mapping[str, Any]) -> HostFacts | tuple[str, str]:
    """A host's facts; of one that gives none, what is wrong with it and what to do."""
    program.say(questions)
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for number, name in enumerate(GROUPS):
        answer = program.hear(b"{")
        if answer is None and not number:
            return program.why()
        if answer is None:
            missing |= dict.fromkeys(GROUPS[number:], "no answer in time" if program.late else "it ended")
            break
        if "error" in answer:
            missing[name] = answer["error"]
        else:
            found[name] = answer["facts"]
    return HostFacts(**found, missing=missing)


def _network_of(participants: Participants) -> dict[str, Any]:
    """The network between the hosts that answer."""
    with asked(participants) as (probes, _):
        reports = {host: probe.report for host, probe in probes.items()}
        found: dict[str, Any] = {"cards": {host: report.cards for host, report in reports.items()}}
        networks = candidates(reports, addresses(probes)) if len(probes) > 1 else []
        if networks:
            faults = try_out(networks, probes)
            best = min(range(len(networks)), key=lambda number: len(faults[number]))
            found |= {"network": networks[best], "blocked": tuple(faults[best])}
    return found
