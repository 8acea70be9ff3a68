"""mpirun's output as a user sees it: what ranks write, and one line at most in the place of mpirun's banners."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from hvd_cifar.errors import RESUME, STALLED

# mpirun --tag-output puts a tag before each piece that a rank writes, even within a line.
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")
PARTS = re.compile(rb"(\[\d+,\d+\]<std(?:out|err)>:|\n|(?:(?!\[\d+,\d+\]<std(?:out|err)>:)[^\n])+\n?)")
BEGUN_TAG = re.compile(rb"\[(?:\d+(?:,(?:\d+(?:\](?:<(?:s(?:t(?:d(?:o(?:u(?:t>?)?)?|e(?:r(?:r>?)?)?)?)?)?)?)?)?)?)?)?$")
RULE = b"-" * 74  # before and after each of mpirun's banners
BANNER_LINES = 40
# setpgid fails in the parent if the child, which also sets its process group, has already called exec.
HARMLESS = re.compile(
    rb"\[[^\]]+\] plm:rsh: Warning: setpgid\(.*\) failed in parent with errno=.*\n"
    rb"|mpirun: Forwarding signal \d+ to job\n"
    rb"|\[[^\]]+\] \d+ more process(?:es have| has) sent help message \S+ / invalid if_inexclude\n"
    rb'|\[[^\]]+\] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n'
)
# Banners that say nothing to a user. The second one: of hosts on different subnets, none has those of the others.
NEEDLESS = ("Primary job  terminated normally", "Did not find interface matching this subnet")
ENDED = re.compile(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)")
EARLY = re.compile(r"exited due to process rank (\d+) with PID \d+ on\s+node \S+ exiting improperly")
KILLED = re.compile(
    r"process rank (\d+) with PID \d+ on\s+node (\S+) exited\s+on\s+signal (?P<n>\d+)(?: \((?P<name>.+)\))?"
)
CUT_OFF = re.compile(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)", re.DOTALL)


class Lost(NamedTuple):
    """A rank that was lost, or a whole host where `rank` is None. `host`: "": that of the rank."""

    host: str
    rank: int | None = None


def by_rank(chunks: Iterable[bytes]) -> Iterator[tuple[int | None, bytes]]:
    """Pieces of mpirun's output, which may end anywhere, each with the rank that wrote it; None: mpirun itself."""
    rank: int | None = None
    pending = b""
    for chunk in chunks:
        data = pending + chunk
        begun = BEGUN_TAG.search(data)
        end = begun.start() if begun else len(data)
        data, pending = data[:end], data[end:]
        for part in PARTS.findall(data):
            if tag := TAG.fullmatch(part):
                rank = int(tag[1])
                continue
            yield rank, part
            if part.endswith(b"\n"):
                rank = None  # each line of a rank starts with a tag
    if pending:
        yield rank, pending


class Errors:
    """What ranks and mpirun write to stderr. Over several hosts each line of a rank gets its rank and host in front."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: each rank's, where there are several, else ()."""
        self.lost: list[Lost] = []  # ranks and hosts that mpirun names
        self._hosts = hosts
        self._begun: dict[int, bytes] = {}  # ranks' incomplete lines
        self._last: dict[int, bytes] = {}  # each rank's last line that is not blank
        self._line = b""  # mpirun's own, incomplete
        self._banner: list[bytes] = []

    def shown(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """What the user sees of mpirun's stderr."""
        for rank, piece in by_rank(chunks):
            yield self._of_mpirun(piece) if rank is None else self._of_rank(rank, piece)
        if rest := b"".join(self._banner) + self._line:
            yield self._shortened(rest)
        if self._hosts:
            yield b"".join(self._named(rank, line + b"\n") for rank, line in sorted(self._begun.items()))

    def _of_rank(self, rank: int, piece: bytes) -> bytes:
        """The lines that this piece completes; on one host the piece itself, so that a progress bar moves."""
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", self._begun.pop(rank, b"") + piece)
        if rest:
            self._begun[rank] = rest
        for line in lines:
            self._last[rank] = line if line.strip() else self._last.get(rank, b"")
        return b"".join(self._named(rank, line) for line in lines) if self._hosts else piece

    def _named(self, rank: int, line: bytes) -> bytes:
        if rank == 0 and line.startswith(b"hvd_cifar: "):  # rank 0 speaks for all
            return line
        return f"rank {rank} on {self._hosts[rank] if rank < len(self._hosts) else '?'}: ".encode() + line

    def _of_mpirun(self, piece: bytes) -> bytes:
        line, self._line = self._line + piece, b""
        if not line.endswith(b"\n"):
            self._line = line
            return b""
        is_rule = line.rstrip() == RULE
        if not is_rule and not self._banner:
            return b"" if HARMLESS.fullmatch(line) else line
        self._banner.append(line)
        if len(self._banner) == 1 or not is_rule and len(self._banner) <= BANNER_LINES:
            return b""
        banner, self._banner = b"".join(self._banner), []
        return self._shortened(banner)

    def _shortened(self, banner: bytes) -> bytes:
        """What a user needs of a banner: nothing, if the last line of its rank is its own error message."""
        text = banner.decode(errors="replace")
        if any(part in text for part in NEEDLESS):
            return b""
        if found := CUT_OFF.search(text):
            self.lost.append(Lost(found[1]))
            return f"hvd_cifar: {found[1]} is lost, and its ranks with it: is it on, and its network up?\n".encode()
        if found := ENDED.search(text):
            if found[2] in ("2", str(RESUME), str(STALLED)) or b"hvd_cifar: " in self._last.get(int(found[1]), b""):
                return b""
            return self._ended_first(int(found[1]), found[2])
        if found := EARLY.search(text):
            return self._ended_first(int(found[1]))
        if found := KILLED.search(text):
            self.lost.append(Lost(found[2], int(found[1])))
            why = "; perhaps the machine ran out of memory" if int(found["n"]) == signal.SIGKILL else ""
            ended = f"rank {found[1]} on {found[2]} was ended by signal {found['n']} ({found['name']})"
            return f"hvd_cifar: {ended}{why}\n".encode()
        return banner

    def _ended_first(self, rank: int, code: str = "0, before the job was over") -> bytes:
        """The line about a rank that ended by itself, whose loss ends the job."""
        self.lost.append(Lost("", rank))
        return f"hvd_cifar: rank {rank} ended first, with exit code {code}\n".encode()
