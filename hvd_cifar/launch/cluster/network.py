"""The network that all hosts of a job share: found by asking each host, and tested between every two hosts.

By default MPI uses every network card that is up. A job hangs where one of these cards does not reach the other
hosts. It also hangs where a card has the same address on every host, as a container bridge has.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.program import Participants, Program
from hvd_cifar.runtime import devices

PROBE = Path(__file__).with_name("probe.py")
SECONDS_TO_ANSWER = 60.0


class Unreachable(UserError):
    """Some hosts of a job cannot take part. An elastic job may continue without them."""

    def __init__(self, message: str, hosts: Sequence[str]) -> None:
        super().__init__(message)
        self.hosts = hosts


@dataclass(frozen=True)
class Card:
    """A network card with an IPv4 address. `speed` is in Mbit/s; 0: unknown."""

    name: str
    address: str
    subnet: str
    speed: int = 0


@dataclass(frozen=True)
class Report:
    """What a host reports of itself.

    ports: that it listens at for the connection test: one that the system chooses, then one as MPI's ranks do.
    gpus: number of GPUs that a process sees there.
    """

    hostname: str
    cards: tuple[Card, ...]
    ports: tuple[int, ...] = ()
    gpus: int = 0


@dataclass(frozen=True)
class Network:
    """A network that joins all hosts: its subnet, such as 10.0.0.0/24, and each host's card on it.

    Where routers join hosts on different subnets, `subnet` lists the subnets with commas.
    """

    subnet: str
    cards: Mapping[str, Card]

    @property
    def card_names(self) -> list[str]:
        """The distinct names of the cards. In most clusters all hosts have the same one."""
        return sorted({card.name for card in self.cards.values()})


def candidates(reports: Mapping[str, Report], resolved: Mapping[str, str | None]) -> list[Network]:
    """The networks that may join all hosts, the best one first.

    A network is a subnet on which every host has a different address. Faster subnets come first; among equally fast
    ones, those of the addresses that the hosts' names resolve to. Where no subnet has all hosts, the network consists
    of the cards to whose addresses the names resolve.

    Args:
        reports: of each host.
        resolved: the address to which this machine resolves each host's name; None: unknown name.
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


def find_network(participants: Participants) -> tuple[Network, dict[str, Report]]:
    """The network of a job, on which each host has connected to every other one, and the hosts' reports.

    Raises:
        Unreachable: a host cannot be reached, has no environment, or cannot reach another host.
        UserError: the hosts have no network in common.
    """
    with asked(participants) as (probes, silent):
        if silent:
            raise Unreachable("; ".join(": ".join(filter(None, fault)) for fault in silent.values()), list(silent))
        reports = {host: probe.report for host, probe in probes.items()}
        resolved = addresses(reports)
        found = candidates(reports, resolved)
        if not found:
            cards = "; ".join(
                f"{host}: {', '.join(f'{card.name} {card.subnet}' for card in report.cards) or 'none'}"
                for host, report in reports.items()
            )
            raise UserError(
                f"the hosts have no network in common ({cards}): connect them to one, or name them by the addresses "
                "of cards between which routers forward"
            )
        faults = try_out(found, probes)
    works = next((network for network, fault in zip(found, faults, strict=True) if not fault), None)
    if works is None:
        fewest = min(faults, key=len)
        out = unusable(fewest, participants.here)
        way = next(way for way in fewest if out[0] in (way.here, way.there))
        others = f", and {len(out) - 1} more hosts have such faults" if len(out) > 1 else ""
        raise Unreachable(f"{way}{others}: check cables and firewalls, which must let all ports through", out)
    return works, reports


def unusable(faults: Sequence[NoWay], here: str) -> list[str]:
    """The hosts without which all others can connect to each other, those with the most faults first.

    This host, `here`, is none of them: it starts the ranks.
    """
    out: list[str] = []
    while counts := Counter(
        host for way in faults if not {way.here, way.there} & {*out} for host in (way.here, way.there) if host != here
    ):
        out.append(max(counts, key=lambda host: (counts[host], host)))
    return out


class Probe(Program):
    """The program `probe.py`, running on one host."""

    def __init__(self, participants: Participants, host: str) -> None:
        super().__init__(participants, host, PROBE.read_text(), SECONDS_TO_ANSWER)
        self.report = Report("", ())

    def listen(self) -> tuple[str, str] | None:
        """Wait for the host's report. If none comes, return what is wrong with the host, and what to do."""
        if (said := self.hear(b"{")) is None:
            return self.why()
        cards = tuple(Card(**card) for card in said["cards"])
        gpus = len(devices.visible_gpus(said["nvidia_smi"], said["variables"]))
        self.report = Report(said["hostname"], cards, tuple(said["ports"]), gpus)
        return None

    def ask(self, targets: list[tuple[str, int]]) -> list[bool]:
        """For each address and port, whether the host can connect to it. To be called once."""
        self.say(targets)
        return self.hear(b"[") or [False] * len(targets)


@contextlib.contextmanager
def asked(participants: Participants) -> Iterator[tuple[dict[str, Probe], dict[str, tuple[str, str]]]]:
    """Probe all hosts at once. Yields the probes of hosts that report; of others, what is wrong and what to do."""
    probes: dict[str, Probe] = {}
    # The programs end inside the pool's block: its threads wait for them, and the pool for its threads.
    with ThreadPoolExecutor(max_workers=len(participants.hosts)) as pool, contextlib.ExitStack() as programs:
        for host in participants.hosts:
            probes[host] = Probe(participants, host)
            programs.callback(probes[host].end)
        answers = dict(zip(probes, pool.map(Probe.listen, probes.values()), strict=True))
        silent = {host: fault for host, fault in answers.items() if fault is not None}
        yield {host: probe for host, probe in probes.items() if host not in silent}, silent


@dataclass(frozen=True)
class NoWay:
    """One host cannot connect to another one at a card's address: at one port, or at any."""

    here: str
    there: str
    card: Card
    port: int | None = None  # None: at any port

    def __str__(self) -> str:
        port = f", port {self.port}" if self.port else ""
        return (
            f"{self.here} cannot reach {self.there} at {self.card.address}{port} ({self.card.name}, {self.card.subnet})"
        )


def try_out(networks: Sequence[Network], probes: Mapping[str, Probe]) -> list[list[NoWay]]:
    """Test the networks: every host connects to every other one. Return the connections that fail on each network."""
    ways = [(number, there) for number in range(len(networks)) for there in probes]
    ports = {host: probe.report.ports for host, probe in probes.items()}

    def reached_from(here: str) -> list[bool]:
        return probes[here].ask(
            [(networks[number].cards[there].address, port) for number, there in ways for port in ports[there]]
        )

    with ThreadPoolExecutor(max_workers=len(probes)) as pool:
        answers = dict(zip(probes, pool.map(reached_from, probes), strict=True))
    faults: list[list[NoWay]] = [[] for _ in networks]
    for here, reached in answers.items():
        left = iter(reached)
        for number, there in ways:
            closed = [port for port in ports[there] if not next(left)]
            if closed:
                port = closed[0] if len(closed) < len(ports[there]) else None
                faults[number].append(NoWay(here, there, networks[number].cards[there], port))
    return faults


def addresses(hosts: Iterable[str]) -> dict[str, str | None]:
    """The address to which this machine resolves each host's name; None: unknown name.

    This machine's own name may stand for a loopback address, as on Debian, and localhost does. It then has the address
    from which this machine reaches another host.
    """
    found = {host: _resolve(host) for host in hosts}
    others = [address for address in found.values() if address and not _is_loopback(address)]
    own = _own_address(others[0]) if others else None
    return {host: own if address and own and _is_loopback(address) else address for host, address in found.items()}


def _resolve(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except (OSError, UnicodeError):  # a label is empty, or has over 63 characters
        return None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _own_address(other: str) -> str | None:
    """The address from which this machine reaches another one; None: there is no route. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((other, 9))
        own: str = probe.getsockname()[0]
        return own
    return None
