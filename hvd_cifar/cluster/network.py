"""The network that all hosts of a job share: found by asking each host, and tried between every two of them.

MPI and Gloo would otherwise take every card they see, and wait for ever on one that leads nowhere, or whose address is
the same everywhere (a container bridge).
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvd_cifar.cluster import ssh
from hvd_cifar.errors import UserError

PROBE = Path(__file__).with_name("probe.py")
SECONDS_TO_ANSWER = 60.0


@dataclass(frozen=True)
class Card:
    """A network card with an IPv4 address. `speed` is in Mbit/s; 0: the card does not say."""

    name: str
    address: str
    subnet: str
    speed: int = 0


@dataclass(frozen=True)
class Report:
    """What a host said of itself. `port` is where it listens while the hosts try to reach each other."""

    hostname: str
    resolves_itself: bool
    cards: tuple[Card, ...]
    port: int = 0


@dataclass(frozen=True)
class Network:
    """A network that all hosts are on: its subnet as in 10.0.0.0/24, and each host's card on it.

    Where hosts are on different subnets, with a way between them, `subnet` lists them with commas.
    """

    subnet: str
    cards: Mapping[str, Card]

    @property
    def card_names(self) -> list[str]:
        """The names that the cards have on the hosts, most often one."""
        return sorted({card.name for card in self.cards.values()})


def candidates(reports: Mapping[str, Report], resolved: Mapping[str, str | None]) -> list[Network]:
    """The networks that may join all hosts, the best one first.

    On the same subnet under different addresses, faster ones first, then the one that the hosts' names lead to. Where
    no subnet has all hosts, each host's card is the one that its name leads to.

    Args:
        reports: of each host.
        resolved: the address of each host's name as this machine sees it; None: it has none.
    """
    subnets = {card.subnet for report in reports.values() for card in report.cards}
    found = []
    for subnet in subnets:
        cards = {
            host: next((card for card in report.cards if card.subnet == subnet), None)
            for host, report in reports.items()
        }
        there = {host: card for host, card in cards.items() if card is not None}
        if len({card.address for card in there.values()}) == len(reports):
            found.append(Network(subnet, there))

    def rank(network: Network) -> tuple[Any, ...]:
        named = sum(card.address == resolved.get(host) for host, card in network.cards.items())
        return -min(card.speed for card in network.cards.values()), -named, network.subnet

    if found:
        return sorted(found, key=rank)
    named_cards = {
        host: next((card for card in report.cards if card.address == resolved.get(host)), None)
        for host, report in reports.items()
    }
    routed = {host: card for host, card in named_cards.items() if card is not None}
    if len(routed) < len(reports):
        return []
    return [Network(",".join(sorted({card.subnet for card in routed.values()})), routed)]


class Way(Protocol):
    """How to run something on another host: the module `ssh`, or `slurm` within an allocation."""

    FAILED: int

    def words(self, host: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on `host`."""

    def explain(self, host: str, complaint: str) -> str:
        """One line on why it ended with `FAILED`."""


def find_network(hosts: Sequence[str], here: str, python: str, gloo: bool, way: Way = ssh) -> Network:
    """The network of a job on these hosts, tried out.

    Args:
        hosts: all that take part; `here` is among them.
        here: the name of this machine, which is asked directly.
        python: the interpreter on every host, at the same path.
        gloo: whether the job runs over Gloo, which ends with a crash on a host that does not know its own name.
        way: to the other hosts.

    Raises:
        UserError: a host cannot be reached, has no environment, or cannot reach another one.
    """
    with asked(hosts, here, python, way) as probes:
        reports = {host: probe.report for host, probe in probes.items()}
        for host, report in reports.items():
            if gloo and not report.resolves_itself:
                raise UserError(
                    f"{host} does not know its own name, '{report.hostname}', and Gloo would crash there: add the "
                    f"line '{_first_address(report)} {report.hostname}' to its /etc/hosts, or use --mpi"
                )
        found = candidates(reports, {host: _resolve(host) for host in hosts})
        if not found:
            cards = "; ".join(
                f"{host}: {', '.join(f'{card.name} {card.subnet}' for card in report.cards) or 'none'}"
                for host, report in reports.items()
            )
            raise UserError(f"the hosts have no network in common ({cards}): connect them to one")
        faults = try_out(found, probes)
    works = next((network for network, fault in zip(found, faults, strict=True) if fault is None), None)
    if works is None:
        raise UserError(f"{faults[0]}: check its cable and the firewalls, which must let all ports through")
    return works


class Probe:
    """The program `probe.py` as it runs on one host."""

    def __init__(self, host: str, is_here: bool, python: str, way: Way = ssh) -> None:
        words = [python, "-I", "-c", PROBE.read_text()]
        self.host = host
        self.way = way
        self.process = subprocess.Popen(
            words if is_here else way.words(host, words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the launcher, which ends this
        )
        self.report = Report("", False, ())
        self._limit = threading.Timer(SECONDS_TO_ANSWER, self.process.kill)
        self._limit.start()

    def listen(self, python: str) -> None:
        """Take the host's report. Raises UserError."""
        try:
            said = json.loads(self._line(b"{"))
        except ValueError:
            raise UserError(self._why(python)) from None
        self.report = Report(
            said["hostname"],
            said["resolves_itself"],
            tuple(
                Card(card["name"], card["address"], _subnet(card["address"], card["netmask"]), card["speed"])
                for card in said["interfaces"]
            ),
            said["port"],
        )

    def ask(self, targets: list[tuple[str, int]]) -> list[bool]:
        """Which of these addresses and ports the host reaches. Once only."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(targets)}\n".encode())
            self.process.stdin.flush()
        try:
            answer: list[bool] = json.loads(self._line(b"["))
        except ValueError:
            return [False] * len(targets)
        return answer

    def end(self) -> None:
        """Let the program on the host end, and ssh or srun with it."""
        self._limit.cancel()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            if stream:
                with contextlib.suppress(OSError):
                    stream.close()
        self.process.terminate()
        self.process.wait()

    def _line(self, start: bytes) -> bytes:
        """The next line that starts so: a login shell may write lines of its own."""
        assert self.process.stdout
        return next((line for line in self.process.stdout if line.startswith(start)), b"")

    def _why(self, python: str) -> str:
        try:
            _, complaint = self.process.communicate(timeout=SECONDS_TO_ANSWER)
        except subprocess.TimeoutExpired:
            complaint = b""
        if self.process.returncode == self.way.FAILED:
            return self.way.explain(self.host, complaint.decode(errors="replace"))
        return (
            f"{self.host} has no environment like this one ({shlex.quote(python)}): "
            "./run.sh setup --hostfile FILE makes it on every host"
        )


@contextlib.contextmanager
def asked(hosts: Sequence[str], here: str, python: str, way: Way = ssh) -> Iterator[dict[str, Probe]]:
    """Probes of all hosts, which have reported, by name; all at once. Raises UserError that names every bad host."""
    probes = {host: Probe(host, host == here, python, way) for host in hosts}
    try:
        with ThreadPoolExecutor(max_workers=len(probes)) as pool:
            failures = list(pool.map(lambda probe: _failure(probe, python), probes.values()))
        wrong = [text for text in failures if text]
        if wrong:
            raise UserError("; ".join(wrong))
        yield probes
    finally:
        for probe in probes.values():
            probe.end()


def _failure(probe: Probe, python: str) -> str | None:
    try:
        probe.listen(python)
    except UserError as error:
        return str(error)
    return None


def try_out(networks: Sequence[Network], probes: Mapping[str, Probe]) -> list[str | None]:
    """What is wrong with each network, None where nothing is: every host connects to every other one on each."""
    ways = [(number, there) for number in range(len(networks)) for there in probes]

    def reached_from(here: str) -> list[bool]:
        targets = [(networks[number].cards[there].address, probes[there].report.port) for number, there in ways]
        return probes[here].ask(targets)

    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        answers = dict(zip(probes, pool.map(reached_from, probes), strict=True))
    faults: list[str | None] = [None] * len(networks)
    for here, reached in answers.items():
        for (number, there), works in zip(ways, reached, strict=True):
            if not works and faults[number] is None:
                card = networks[number].cards[there]
                faults[number] = f"{here} cannot reach {there} at {card.address} ({card.name}, {card.subnet})"
    return faults


def _subnet(address: str, netmask: str) -> str:
    return str(ipaddress.ip_network(f"{address}/{netmask}", strict=False))


def _first_address(report: Report) -> str:
    return report.cards[0].address if report.cards else "127.0.1.1"


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None
