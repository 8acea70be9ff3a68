"""Runs mpirun, horovodrun or a single rank, and shows the ranks' output without tags and banners."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from hvd_cifar.errors import RESUME
from hvd_cifar.launch.cluster.remarks import ended_by_signal, without_banners, without_tags
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank
from hvd_cifar.launch.job import Job, Starter, chunks, write

# Exit codes of an ssh that horovodrun ends. 0: horovodrun waits for it in two threads, and one takes the other's code.
SSH_ENDED = (0, 255, 128 + signal.SIGTERM, 128 + signal.SIGKILL)


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


def _horovodrun(
    words: list[str], env: Mapping[str, str], hosts: list[str], job: Job, codes: list[tuple[int, int]]
) -> Starter:
    """horovodrun over Gloo. `hosts`: as for `_mpirun`; `codes`: of `without_tags`."""

    def output(stream: BinaryIO) -> None:
        for rank, line in without_tags(stream, codes):
            if not hosts or rank in (0, None):
                write(1, line)

    def errors(stream: BinaryIO) -> None:
        lines = NamedLines(hosts)
        for rank, line in without_tags(stream, codes):
            job.pass_on(line if rank is None or not hosts else lines.add(rank, line))
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
    words, env, hosts = ready.words, ready.env, ready.hosts
    name = Path(words[0]).name
    if name == "mpirun":
        return job.run(_mpirun(words, env, hosts, job))
    if name != "horovodrun":
        return job.run(_python(words, env, job))
    codes: list[tuple[int, int]] = []
    code = job.run(_horovodrun(words, env, hosts, job, codes))
    is_of_a_rank = bool(codes) and code == 1
    rank, code = first_cause(codes, job.stops) if is_of_a_rank else (0, code)
    # If no rank is on this host, a request to stop ends the ssh sessions, and the guards then stop the ranks.
    if job.ends_sessions and code in SSH_ENDED:
        return RESUME
    if is_of_a_rank and (number := signal_of(code)):
        host = hosts[rank] if hosts else socket.gethostname()
        job.explain(ended_by_signal(rank, host, number, signal.strsignal(number) or ""))
    return code


def first_cause(codes: list[tuple[int, int]], stops: bool) -> tuple[int, int]:
    """The rank and exit code that are the cause of the end of a job over Gloo. `codes`: of `without_tags`.

    Some codes are consequences. A rank that lost another one exits with 1, perhaps before that one ends. horovodrun
    then ends the rest with SIGTERM, and its own code is always 1. A rank that stopped as asked speaks for all.
    """
    asked = (found for found in codes if stops and found[1] == RESUME)
    causes = (found for found in codes if found[1] != 1 and signal_of(found[1]) != signal.SIGTERM)
    return next(asked, None) or next(causes, codes[0])


def signal_of(code: int) -> int:
    """The signal of an exit code, which is negative (Python) or 128 + the signal (shell); 0: none."""
    return -code if code < 0 else code - 128 if 128 < code < 160 else 0
