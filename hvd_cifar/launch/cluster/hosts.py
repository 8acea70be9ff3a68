"""Hosts and their slots, as in `-H` and hostfiles. Standard library only: set-up runs on a bare Python."""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError, shown

MOST_RANKS_BY_DEFAULT = 8


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may have."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from a text such as a:4,b:4; a host without a number has one slot. Raises UserError."""
    where = f"-H {shown(text)}"
    return _added_up(_read_line(part.strip(), where, "NAME:SLOTS") for part in text.split(","))


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts from a file that mpirun, MPICH's mpirun or PBS read, in the order of their first lines. Raises UserError.

    A line is `NAME slots=N`, `NAME:N`, or a name alone, which is a slot. Blank lines and comments (#) are skipped.
    """
    where = f"--hostfile {path}"
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{where}: {reason}; give a file with a line NAME slots=N for each host") from None
    texts = {number: line.partition("#")[0].strip() for number, line in enumerate(lines, 1)}
    form = "NAME slots=N, NAME:N or NAME"
    hosts = _added_up(_read_line(text, f"{where} line {n}", form) for n, text in texts.items() if text)
    if not hosts:
        raise UserError(f"{where} names no host; write a line NAME slots=N for each")
    return hosts


def _read_line(text: str, where: str, form: str) -> Host:
    """A host; one slot if the line has no number of them. `form`: what the line should be like."""
    text = re.sub(r"\s+max[_-]slots\s*=\s*\d+", "", text)  # mpirun's limit; ours is the number of slots
    match = re.fullmatch(r"(\w[\w.-]*)(?:(?::|\s+slots\s*=\s*)(\S+))?", text)
    if not match:
        user = "; its user's name goes into ~/.ssh/config" if re.match(r"\S+@", text) else ""
        raise UserError(f"{where}: '{shown(text)}' is not {form}{user}; correct it")
    name, number = match[1], match[2] or "1"
    if not re.fullmatch("[1-9][0-9]{0,5}", number):
        raise UserError(f"{where}: slots of {shown(name)}: expected a whole number, got '{shown(number)}'")
    return Host(name, int(number))


def _added_up(found: Iterable[Host]) -> tuple[Host, ...]:
    """Each host once, with the slots of all its lines: PBS writes a line for each slot."""
    slots = Counter[str]()
    for host in found:
        slots[host.name] += host.slots
    return tuple(Host(name, number) for name, number in slots.items())


def hosts_of_ranks(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Each rank's host by name: ranks fill one host before the next, as under mpirun here. Without hosts: localhost."""
    names = (host.name for host in hosts or [Host("localhost", ranks)] for _ in range(host.slots))
    return list(itertools.islice(names, ranks))


def ranks_by_default(gpus: int, cores: int) -> int:
    """One rank per GPU, else one per core. At most 8, since more ranks gain little with the default batch sizes."""
    return min(gpus or cores, MOST_RANKS_BY_DEFAULT)


def is_local(name: str) -> bool:
    """Whether a host is this machine, by its name or by its address."""
    own = socket.gethostname()
    if name in ("localhost", own, own.partition(".")[0]):
        return True
    try:
        address = socket.gethostbyname(name)
        with socket.socket() as probe:
            probe.bind((address, 0))  # succeeds only for this machine's own addresses
    except (OSError, UnicodeError):  # a label is empty, or has over 63 characters
        return False
    return True
