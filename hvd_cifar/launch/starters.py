"""Runs mpirun or a single rank, and shows the ranks' output without tags and banners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from hvd_cifar.launch.cluster.remarks import without_banners
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank
from hvd_cifar.launch.job import Job, Starter, chunks, write


@dataclass(frozen=True)
class Ready:
    """A job that can start.

    words, env: the command that starts its ranks.
    hosts: each rank's host where there are several hosts, else [].
    """

    words: list[str]
    env: dict[str, str]
    hosts: list[str]


def _mpirun(words: list[str], env: Mapping[str, str], hosts: list[str], job: Job) -> Starter:
    """mpirun. `hosts`: each rank's host where there are several hosts, else []; see `NamedLines`."""
    lines = NamedLines(hosts)
    found = [value for name, value in pairwise(words) if name == "btl_tcp_if_include"]
    subnets = found[0].split(",") if found and "," in found[0] else []

    def output(stream: BinaryIO) -> None:  # even on one host: mpirun ends its ranks if it cannot write its output
        for rank, piece in by_rank(chunks(stream)) if hosts else ((0, piece) for piece in chunks(stream)):
            if rank in (0, None):
                write(1, piece)

    def of_mpirun(pieces: Iterable[bytes]) -> Iterator[bytes]:
        for rank, piece in by_rank(pieces):
            if rank is None:
                yield piece
            else:
                job.pass_on(lines.add(rank, piece))

    def errors(stream: BinaryIO) -> None:
        if hosts:
            pieces = without_banners(of_mpirun(chunks(stream)), subnets, lines.last)
        else:
            pieces = without_banners(chunks(stream), subnets)
        for piece in pieces:
            job.pass_on(piece)
        job.pass_on(lines.rest())

    return Starter(words, env, output, errors)


def _python(words: list[str], env: Mapping[str, str], job: Job) -> Starter:
    """A single rank, whose stdout is this process's."""

    def errors(stream: BinaryIO) -> None:
        for piece in chunks(stream):
            job.pass_on(piece)

    return Starter(words, env, None, errors)


def start(ready: Ready, job: Job) -> int:
    """Run the program that starts the ranks, and return the job's exit code."""
    if Path(ready.words[0]).name == "mpirun":
        return job.run(_mpirun(ready.words, ready.env, ready.hosts, job))
    return job.run(_python(ready.words, ready.env, job))
