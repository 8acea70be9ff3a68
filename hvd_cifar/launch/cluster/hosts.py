"""Hosts and their slots, as in `-H` and hostfiles. Standard library only: set-up runs on a bare Python."""

from __future__ import annotations

import functools
import itertools
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.errors import UserError, printable
from hvd_cifar.launch.cluster import ssh

MOST_RANKS_BY_DEFAULT = 8
MOST_BYTES = 1 << 24  # that are read of a hostfile: it may be a device without an end
MOST_SHOWN = 80  # characters of a wrong line in an error message


@dataclass(frozen=True)
class Host:
    """A host, and how many ranks it may have."""

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Hosts from a text such as a:4,b:4; a host without a number has one slot. Raises UserError."""
    where = f"-H {_shown(text)}"
    found = [_read_line(part.strip(), where, "NAME:SLOTS") for part in text.split(",")]
    _check_each_is_there_once([name for name, _ in found], where)
    return tuple(Host(name, slots or 1) for name, slots in found)


def read_hostfile(path: Path, counts_cores: bool = True) -> tuple[Host, ...]:
    """Hosts from a file that mpirun, MPICH's mpirun or PBS read, in the order of their first lines. Raises UserError.

    A line is `NAME slots=N`, `NAME max_slots=N`, `NAME:N`, or a name alone. As for mpirun, a host that is there once by
    its name alone has a slot for each of its cores. Where such a name is repeated, as PBS does, each line is a slot.
    Blank lines and comments (# or //) are skipped.

    Args:
        path: of the file.
        counts_cores: whether such hosts are asked for their cores; else each line is a slot.
    """
    where = f"--hostfile {path}"
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_BYTES).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"{where}: {reason}; give a file with a line NAME slots=N for each host") from None
    texts = {number: re.split("#|//", line)[0].strip() for number, line in enumerate(lines, 1)}
    found = [_read_line(text, f"{where} line {n}", "NAME slots=N, NAME:N or NAME") for n, text in texts.items() if text]
    if not found:
        raise UserError(f"{where} names no host; write a line NAME slots=N for each")
    _check_each_is_there_once([name for name, said in found if said], where)
    slots: dict[str, int] = {}
    for name, said in found:
        slots[name] = slots.get(name, 0) + (said or 1)
    alone = [name for name, said in found if said is None]
    is_of_pbs = str(path) == os.environ.get("PBS_NODEFILE") or len(set(alone)) < len(alone)
    if counts_cores and not is_of_pbs:
        with ThreadPoolExecutor() as pool:
            slots |= zip(alone, pool.map(_cores_of, alone), strict=True)
    return tuple(Host(name, number) for name, number in slots.items())


@functools.cache
def _cores_of(name: str) -> int:
    """The cores of a host. Raises UserError where it cannot be asked."""
    if is_local(name):
        return len(os.sched_getaffinity(0))
    try:
        return int(ssh.ask(name, ["nproc"], 60).split()[-1])  # after a login shell's text
    except (UserError, LookupError, ValueError) as failure:
        raise UserError(
            f"--hostfile: {name} stands there without slots=N, and cannot be asked for its cores: {failure}"
        ) from None


def _read_line(text: str, where: str, form: str) -> tuple[str, int | None]:
    """A host's name, and its slots if the line has a number of them. `form`: what the line should be like."""
    match = re.fullmatch(r"(\w[\w.-]*)(?::(\S+))?((?:\s+[\w-]+\s*=\s*\S+)*)", text)
    given = dict(re.findall(r"([\w-]+)\s*=\s*(\S+)", match[3])) if match else {}
    most = given.pop("max_slots", None) or given.pop("max-slots", None)
    number = given.pop("slots", None) or given.pop("cpu", None) or given.pop("count", None) or most
    if not match or given or (match[2] and number):
        user = "; its user's name goes into ~/.ssh/config" if re.match(r"\S+@", text) else ""
        raise UserError(f"{where}: '{_shown(text)}' is not {form}{user}; correct it")
    number = number or match[2]
    if number and not re.fullmatch("[1-9][0-9]{0,5}", number):
        raise UserError(f"{where}: slots of {_shown(match[1])}: expected a whole number, got '{_shown(number)}'")
    return match[1], int(number) if number else None


def _shown(text: str) -> str:
    """The text on one line, at most `MOST_SHOWN` characters."""
    shown = printable(text)
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def _check_each_is_there_once(names: Sequence[str], where: str) -> None:
    for name, times in Counter(names).items():
        if times > 1:
            raise UserError(f"{where}: {_shown(name)} is there twice; give it one line with all its slots")


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
