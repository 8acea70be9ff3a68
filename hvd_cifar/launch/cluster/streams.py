"""The output of ranks on several hosts: replaces mpirun's tags by the rank and host of each line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

# mpirun --tag-output puts a tag before each piece that a rank writes, even within a line.
TAG = re.compile(rb"\[\d+,(\d+)\]<std(?:out|err)>:")
PARTS = re.compile(rb"(\[\d+,\d+\]<std(?:out|err)>:|\n|(?:(?!\[\d+,\d+\]<std(?:out|err)>:)[^\n])+\n?)")
BEGUN_TAG = re.compile(rb"\[(?:\d+(?:,(?:\d+(?:\](?:<(?:s(?:t(?:d(?:o(?:u(?:t>?)?)?|e(?:r(?:r>?)?)?)?)?)?)?)?)?)?)?)?$")
# Begins messages that rank 0 prints for all ranks.
OF_ALL = b"hvd_cifar: "


def by_rank(chunks: Iterable[bytes]) -> Iterator[tuple[int | None, bytes]]:
    """Pieces of mpirun's output, each with the rank that wrote it; None: mpirun itself.

    A piece may end anywhere in a line. A rank's own text that looks like a tag is read as a tag.
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
                rank = None  # each line of a rank starts with a tag
    if pending:
        yield rank, pending


class NamedLines:
    """Joins the pieces of ranks' stderr to lines, and puts rank and host before each."""

    def __init__(self, hosts: Sequence[str]) -> None:
        """`hosts`: each rank's host."""
        self._hosts = hosts
        self._begun: dict[int, bytes] = {}
        self.last: dict[int, bytes] = {}  # each rank's last line that is not blank

    def add(self, rank: int, piece: bytes) -> bytes:
        """The rank's lines that this piece of its output completes."""
        whole = self._begun.pop(rank, b"") + piece
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?=[^\n])", whole)  # a progress bar's lines end with \r
        if rest:
            self._begun[rank] = rest
        return b"".join(self._named(rank, line) for line in lines)

    def rest(self) -> bytes:
        """The ranks' last, incomplete lines."""
        return b"".join(self._named(rank, line + b"\n") for rank, line in sorted(self._begun.items()))

    def _named(self, rank: int, line: bytes) -> bytes:
        if line.strip():
            self.last[rank] = line
        if rank == 0 and line.startswith(OF_ALL):
            return line
        host = self._hosts[rank] if rank < len(self._hosts) else "?"
        return f"rank {rank} on {host}: ".encode() + line
