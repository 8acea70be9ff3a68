"""Removes what mpirun prints about a failed rank, or shortens it to one line."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hvd_cifar.errors import RESUME, STALLED
from hvd_cifar.runtime.stalls import lost_ranks

RULE = b"-" * 74
BANNER_LINES = 40
# setpgid fails in the parent if the child, which also sets its process group, has already called exec.
HARMLESS = re.compile(
    rb"\[[^\]]+\] plm:rsh: Warning: setpgid\(.*\) failed in parent with errno=.*\n"
    rb"|mpirun: Forwarding signal \d+ to job\n"
    rb"|\[[^\]]+\] \d+ more process(?:es have| has) sent help message \S+ / invalid if_inexclude\n"
    rb'|\[[^\]]+\] Set MCA parameter "orte_base_help_aggregate" to 0 to see all help / error messages\n'
)


@dataclass(frozen=True)
class Lost:
    """A rank that was lost, or a whole host where `rank` is None."""

    host: str
    rank: int | None = None


# The lines in which this launcher reports lost ranks and hosts.
_RANK_LINE = re.compile(r"hvd_cifar: rank (\d+) (?:on (\S+) was ended by signal|ended first, with exit code)")
_HOST_LINE = re.compile(r"hvd_cifar: (\S+) is lost, and its ranks with it")


def ended_by_signal(rank: int, host: str, number: int, name: str) -> str:
    """The line about a rank that a signal ended."""
    why = "; perhaps the machine ran out of memory" if number == signal.SIGKILL else ""
    return f"hvd_cifar: rank {rank} on {host} was ended by signal {number} ({name}){why}\n"


def lost_in(said: bytes) -> list[Lost]:
    """The lost ranks and hosts, from the lines that the user saw on stderr.

    If ranks name one that hangs, only that one counts: the others ended because of it.
    """
    text = said.decode(errors="replace")
    if hanging := lost_ranks(text):
        return [Lost(one.host, one.rank) for one in hanging]
    lines = text.splitlines()
    ranks = [Lost(match[2] or "", int(match[1])) for line in lines if (match := _RANK_LINE.match(line))]
    return ranks + [Lost(match[1]) for line in lines if (match := _HOST_LINE.match(line))]


def without_banners(
    chunks: Iterable[bytes], subnets: Collection[str] = (), of_ranks: Mapping[int, bytes] | None = None
) -> Iterator[bytes]:
    """mpirun's stderr without its banners about failed ranks. A banner that tells something new becomes one line.

    `subnets`: of routed hosts. mpirun complains on each host about those of the others.
    `of_ranks`: each rank's last line, where `chunks` does not hold the ranks' lines.

    A banner stands between two rules. All other output passes at once, even an incomplete line (a progress bar), unless
    it may become a rule.
    """
    pending = line = said = b""  # said: the last line that passed and is not blank
    block: list[bytes] = []
    at_start = True
    for chunk in chunks:
        data, pending = pending + chunk, b""
        for piece in re.findall(rb"[^\n]*\n|[^\n]+", data):
            complete = piece.endswith(b"\n")
            is_rule = complete and piece.rstrip() == RULE
            if block and not complete or not block and at_start and not complete and RULE.startswith(piece):
                pending = piece
            elif block:
                block.append(piece)
                if is_rule or len(block) > BANNER_LINES:
                    yield _shortened(b"".join(block), said, subnets, of_ranks)
                    block = []
            elif at_start and is_rule:
                block = [piece]
            elif not HARMLESS.fullmatch(piece):
                yield piece
                at_start = complete
                line += piece
                if complete:
                    said, line = line if line.strip() else said, b""
    rest = b"".join(block) + pending
    if rest:
        yield _shortened(rest, said, subnets, of_ranks)


def _shortened(banner: bytes, said: bytes, subnets: Collection[str], of_ranks: Mapping[int, bytes] | None) -> bytes:
    """What a user needs of a banner: nothing, if the line before it, `said` or the rank's, is its own error message."""
    text = banner.decode(errors="replace")
    ended = re.search(r"Process name: \[\[\d+,\d+\],(\d+)\]\s+Exit code:\s+(\d+)", text)
    killed = re.search(
        r"process rank (\d+) with PID \d+ on\s+node (\S+) exited\s+on\s+signal (\d+)(?: \((.+)\))?", text
    )
    early = re.search(r"exited due to process rank (\d+) with PID \d+ on\s+node \S+ exiting improperly", text)
    lost = re.search(r"lost communication with a remote daemon.*Remote daemon: \S+ on node (\S+)", text, re.DOTALL)
    absent = re.search(r"Value: +(\S+)\s+Message: +Did not find interface matching this subnet", text)
    if "Primary job  terminated normally" in text or absent and absent[1] in subnets:
        return b""
    if lost:
        return f"hvd_cifar: {lost[1]} is lost, and its ranks with it: is it on, and its network up?\n".encode()
    if ended:
        own = said if of_ranks is None else of_ranks.get(int(ended[1]), b"")
        told = ended[2] in ("2", str(RESUME), str(STALLED)) or b"hvd_cifar: " in own
        return b"" if told else f"hvd_cifar: rank {ended[1]} ended first, with exit code {ended[2]}\n".encode()
    if early:  # mpirun's own exit code is then 1
        return f"hvd_cifar: rank {early[1]} ended first, with exit code 0, before the job was over\n".encode()
    if killed:
        return ended_by_signal(int(killed[1]), killed[2], int(killed[3]), killed[4]).encode()
    return banner
