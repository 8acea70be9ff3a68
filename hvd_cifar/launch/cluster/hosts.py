"""Hosts and their slots, as in `-H` and hostfiles. Standard library only: set-up runs on a bare Python."""

from __future__ import annotations

import itertools
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError

MOST_RANKS_BY_DEFAULT = 8
MOST_BYTES = 1 << 20  # of a hostfile: enough for 20,000 hosts
MOST_SHOWN = 80  # characters of a wrong line in an error message


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may have."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from a text such as a:4,b:4; a host without a number has one slot. Raises UserError."""
    hosts = []
    where = f"-H {_shown(text)}"
    for part in text.split(","):
        name, colon, slots = part.strip().partition(":")
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise UserError(f"{where}: '{_shown(part)}' is not a host; write NAME:SLOTS, separated by commas")
        hosts.append(Host(name, count(slots, f"{where}: slots of {_shown(name)}") if colon else 1))
    _check_each_is_there_once(hosts, where)
    return tuple(hosts)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Hosts from a file with lines `NAME slots=N`; blank lines and comments (#) are skipped. Raises UserError."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
        lines = data.decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"--hostfile {path}: {reason}; give a file with a line NAME slots=N for each host") from None
    if len(data) > MOST_BYTES:
        raise UserError(f"--hostfile {path}: it has more than {MOST_BYTES:,} bytes; give a file of hosts")
    hosts = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\w[\w.-]*)\s+slots\s*=\s*(\S+)", text)
        if not match:
            raise UserError(f"--hostfile {path} line {number}: '{_shown(text)}' is not NAME slots=N; correct it")
        hosts.append(Host(match[1], count(match[2], f"--hostfile {path} line {number}: slots")))
    if not hosts:
        raise UserError(f"--hostfile {path} names no host; write a line NAME slots=N for each")
    _check_each_is_there_once(hosts, f"--hostfile {path}")
    return tuple(hosts)


def count(text: str, what: str, least: int = 1) -> int:
    """The text as a whole number of at least `least`. Raises UserError, whose message begins with `what`."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < least:
        raise UserError(f"{what}: expected a whole number of at least {least}, got '{_shown(text)}'")
    return int(text)


def _shown(text: str) -> str:
    """The text on one line, at most `MOST_SHOWN` characters."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def _check_each_is_there_once(hosts: Sequence[Host], where: str) -> None:
    for name, times in Counter(host.name for host in hosts).items():
        if times > 1:
            raise UserError(f"{where}: {_shown(name)} is there twice; give it one line with all its slots")


def hosts_of_ranks(hosts: Sequence[Host], ranks: int) -> list[str]:
    """Each rank's host by name: ranks fill one host before the next, as under mpirun here."""
    return list(itertools.islice((host.name for host in hosts for _ in range(host.slots)), ranks))


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
