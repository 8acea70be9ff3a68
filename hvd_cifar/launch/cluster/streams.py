"""What the ranks of several hosts write, told apart: mpirun's tags are taken off, and a rank's name is put in front."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

# mpirun --tag-output puts one in front of every piece that a rank writes, in the middle of a line too.
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")
PARTS = re.compile(rb"(\[\d+,\d+\]<std(?:out|err)>:|\n|(?:(?!\[\d+,\d+\]<std(?:out|err)>:)[^\n])+\n?)")
BEGUN_TAG = re.compile(rb"\[(?:\d+(?:,(?:\d+(?:\](?:<(?:s(?:t(?:d(?:o(?:u(?:t>?)?)?|e(?:r(?:r>?)?)?)?)?)?)?)?)?)?)?)?$")
# What the program says once for all ranks.
OF_ALL = b"hvd_cifar: "


def by_rank(chunks: Iterable[bytes]) -> Iterator[tuple[int | None, bytes]]:
    """Pieces of mpirun's output with the rank that wrote them; None: mpirun itself.

    The pieces of a rank are its output, cut anywhere. A text of a rank's own that looks like a tag is taken for one.
    """
    rank: int | None = None
    pending = b""
    for chunk in chunks:
        data = pending + chunk
        begun = BEGUN_TAG.search(data)
        end = begun.start() if begun else len(data)
        data, pending = data[:end], data[end:]
        for part in PARTS.findall(data):
            tag = TAG.fullmatch(part)
            if tag:
                rank = int(tag[1])
                continue
            yield rank, part
            if part.endswith(b"\n"):
                rank = None  # each of a rank's lines has a tag
    if pending:
        yield rank, pending


class NamedLines:
    """Whole lines of several ranks' errors, each with its rank and host in front."""

    def __init__(self, hosts: list[str]) -> None:
        """`hosts`: the name of each rank's host."""
        self._hosts = hosts
        self._begun: dict[int, bytes] = {}

    def add(self, rank: int, piece: bytes) -> bytes:
        """The lines of a rank that this piece of its output completes."""
        whole = self._begun.pop(rank, b"") + piece
        *lines, rest = re.split(rb"(?<=\n)", whole)
        if rest:
            self._begun[rank] = rest
        return b"".join(self._named(rank, line) for line in lines)

    def rest(self) -> bytes:
        """What ranks have written after their last line break."""
        return b"".join(self._named(rank, line + b"\n") for rank, line in sorted(self._begun.items()))

    def _named(self, rank: int, line: bytes) -> bytes:
        if rank == 0 and line.startswith(OF_ALL):
            return line
        host = self._hosts[rank] if rank < len(self._hosts) else "?"
        return f"rank {rank} on {host}: ".encode() + line
