"""Findings as a table for a terminal, or as JSON."""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvd_cifar.tools.doctor.facts import Link, Subject
from hvd_cifar.tools.doctor.finding import Finding, seconds, speed

WORDS = {"ok": "ok", "warning": "warn", "failure": "FAIL"}
STYLES = {"ok": "green", "warning": "yellow", "failure": "bold red"}
LINKS_SHOWN = 12


def of(subject: Subject, findings: Sequence[Finding], width: int, colour: bool) -> str:
    """A row for each finding, with advice below it; then the links; then a summary."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("what", "", "where"):
        table.add_column(name, no_wrap=True)
    table.add_column("found")
    check = ""
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="bold")
        name, check = (finding.check if finding.check != check else ""), finding.check
        table.add_row(name, Text(WORDS[finding.level], style=STYLES[finding.level]), finding.host, text)
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, highlight=False, force_terminal=colour, emoji=False, markup=False)
    console.print(table)
    if subject.job and subject.job.links:
        console.print()
        console.print(_links(subject.job.links, subject.job.through))
    console.print()
    console.print(summary(findings))
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def summary(findings: Sequence[Finding]) -> str:
    """The summary, one line."""
    counts = Counter(finding.level for finding in findings)
    parts = [
        f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("failure", "warning") if counts[level]
    ]
    if counts["failure"]:
        return f"A run would fail: {' and '.join(parts)}."
    return f"A run would work; {parts[0]}." if parts else "All is well."


def _links(links: Sequence[Link], through: str) -> Table:
    title = f"all-reduce of two ranks, through {through}"
    worst = sorted(links, key=lambda link: link.bytes_per_second)
    if len(links) > LINKS_SHOWN:
        title += f": the slowest {LINKS_SHOWN} of {len(links)}"
        links = worst[:LINKS_SHOWN]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    table.title_style = ""
    for name in ("between", "", "latency", "bandwidth", "sums"):
        table.add_column(name, justify="right" if name in ("latency", "bandwidth") else "left")
    for link in links:
        sums = Text("right", "green") if not link.wrong_values else Text(f"{link.wrong_values:,} wrong", "bold red")
        there = link.b if link.a != link.b else f"(ranks {link.ranks[0]} and {link.ranks[1]})"
        table.add_row(link.a, there, seconds(link.seconds), speed(link.bytes_per_second), sums)
    return table


def as_json(subject: Subject, findings: Sequence[Finding]) -> str:
    """Findings and all facts, for programs."""
    network = subject.network
    content = {
        "would_fail": any(finding.level == "failure" for finding in findings),
        "findings": [finding.model_dump() for finding in findings],
        "hosts": {host.name: host.slots for host in subject.hosts},
        "network": network and {"subnet": network.subnet, "cards": {h: c.name for h, c in network.cards.items()}},
        "job": subject.job and subject.job.model_dump(),
        "facts": {name: facts.model_dump() for name, facts in subject.facts.items()},
    }
    return json.dumps(content, indent=1)
