"""The network that all hosts of a job share: found by asking each host, and tested between every two hosts.

By default MPI uses every network card that is up. A job hangs where one of these cards does not reach the other
hosts. It also hangs where a card has the same address on every host, as a container bridge has.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster import ssh

PROBE = Path(__file__).with_name("probe.py")
SECONDS_TO_ANSWER = 60.0
LATE = 124  # the exit code of `timeout`


@dataclass(frozen=True)
class Participants:
    """The names of the hosts that take part in a job."""

    hosts: Sequence[str]
    here: str  # the name of this machine
    way: ModuleType = ssh  # how to run commands on the others: the module `ssh` or `slurm`


class Program:
    """A program that runs on one host. The caller must `end` it; on the host it ends when its input is closed."""

    def __init__(self, participants: Participants, host: str, text: str, seconds: float) -> None:
        """Start the program `text` on `host`, by this Python's path, for at most `seconds`.

        Raises UserError where ssh or srun cannot start here.
        """
        self.host, self.way, self._seconds = host, participants.way, seconds
        # The empty line ends what a login shell may have printed without one, such as a terminal's title.
        words = [sys.executable, "-I", "-c", f"print()\n{text}"]
        command = words if host == participants.here else self.way.words(host, words)
        if not shutil.which(command[0]):
            raise UserError(ssh.NO_SSH if command[0] == "ssh" else f"there is no {command[0]} here")
        pipe, command = subprocess.PIPE, ["timeout", str(seconds), *command]
        # In a session of its own: Ctrl-C reaches only the launcher, which ends this program.
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)

    def say(self, value: Any) -> None:
        """Send a line; no error if the program has ended."""
        assert self.process.stdin
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(f"{json.dumps(value)}\n".encode())
            self.process.stdin.flush()

    def hear(self, start: bytes) -> Any:
        """The next line that begins with `start`, as JSON; None: the program has ended. Skips a login shell's text."""
        assert self.process.stdout
        line = next((line for line in self.process.stdout if line.startswith(start)), b"")
        try:
            return json.loads(line)
        except ValueError:
            return None

    def why(self) -> tuple[str, str]:
        """What is wrong with a host that does not answer, and what to do. Waits for the program's end."""
        assert self.process.stderr
        complaint, code = self.process.stderr.read().decode(errors="replace"), self.process.wait()
        if code == LATE:
            return f"{self.host} does not answer within {self._seconds:g} s", f"what is it busy with? ssh {self.host}"
        if code == self.way.FAILED:
            return self.way.diagnose(self.host, complaint)
        what = f"{self.host} has no environment like this one ({shlex.quote(sys.executable)})"
        return what, "./run.sh setup --hostfile FILE makes it on every host"

    def end(self) -> None:
        """End the program on the host, and ssh or srun here."""
        assert self.process.stdin and self.process.stdout and self.process.stderr
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.terminate()
        self.process.wait()
        # Only now: a thread that waits for a line locks its stream until the program ends.
        self.process.stdout.close()
        self.process.stderr.close()


@contextlib.contextmanager
def running(
    participants: Participants, text: str, seconds: float, question: Callable[[str], Any] = lambda host: None
) -> Iterator[tuple[dict[str, Program], dict[str, Any], dict[str, tuple[str, str]]]]:
    """Run a program on all hosts at once during the block, and ask each a question, a line of JSON.

    Yields the programs and answers of the hosts that answer, and of each other host what is wrong and what to do.
    """
    programs: dict[str, Program] = {}

    def ask(host: str) -> tuple[Any, tuple[str, str]]:
        programs[host].say(question(host))
        answer = programs[host].hear(b"{")
        return answer, ("", "") if answer is not None else programs[host].why()

    # The programs end inside the pool's block: its threads wait for them, and the pool for its threads.
    with ThreadPoolExecutor(max_workers=len(participants.hosts)) as pool, contextlib.ExitStack() as stack:
        for host in participants.hosts:
            programs[host] = Program(participants, host, text, seconds)
            stack.callback(programs[host].end)
        found = dict(zip(programs, pool.map(ask, programs), strict=True))
        answers = {host: answer for host, (answer, _) in found.items() if answer is not None}
        silent = {host: why for host, (answer, why) in found.items() if answer is None}
        yield {host: programs[host] for host in answers}, answers, silent


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


def find_network(participants: Participants) -> Network:
    """The network of a job, on which each host has connected to every other one.

    Raises:
        Unreachable: a host cannot be reached, has no environment, or cannot reach another host.
        UserError: the hosts have no network in common.
    """
    with running(participants, PROBE.read_text(), SECONDS_TO_ANSWER) as (programs, answers, silent):
        if silent:
            raise Unreachable("; ".join(": ".join(fault) for fault in silent.values()), list(silent))
        cards = {host: [Card(**card) for card in answer["cards"]] for host, answer in answers.items()}
        found = candidates(cards, {host: answer["named"] for host, answer in answers.items()})
        if not found:
            bare = ", ".join(host for host, has in cards.items() if not has)
            raise UserError(f"the hosts have no network in common: no card of {bare} is up; connect all to one network")
        tried = []
        for network in found:
            tried.append(_faults(network, programs, {host: answer["ports"] for host, answer in answers.items()}))
            if not tried[-1]:
                return network
    fewest = min(tried, key=len)
    worst = worst_host(fewest, participants.here)
    way = next(text for ends, text in fewest.items() if worst in ends)
    raise Unreachable(f"{way}: check cables and firewalls, which must let all ports through", [worst])


def candidates(cards: Mapping[str, Sequence[Card]], named: Mapping[str, str]) -> list[Network]:
    """The networks that may join all hosts, the best one first.

    A network is a subnet on which every host has a different address. Faster subnets come first; among equally fast
    ones, those by which the hosts are named. Where no subnet has all hosts, routers may join the cards by which they
    are named, or else their fastest ones.

    `named`: the address to which each host's name leads; "": unknown.
    """
    found = []
    for subnet in {card.subnet for has in cards.values() for card in has}:
        there = {host: card for host, has in cards.items() for card in reversed(has) if card.subnet == subnet}
        if len({card.address for card in there.values()}) == len(cards):
            found.append(Network(subnet, there))

    def rank(network: Network) -> tuple[int, int, str]:
        of_names = sum(card.address == named[host] for host, card in network.cards.items())
        return -min(card.speed for card in network.cards.values()), -of_names, network.subnet

    if found or not all(cards.values()):
        return sorted(found, key=rank)
    routed = {host: max(has, key=lambda card: (card.address == named[host], card.speed)) for host, has in cards.items()}
    return [Network(",".join(sorted({card.subnet for card in routed.values()})), routed)]


def worst_host(faults: Iterable[tuple[str, str]], here: str) -> str:
    """The host at an end of most of the ways that fail, but not this one, which starts the ranks."""
    counts = Counter(host for ends in faults for host in ends if host != here)
    return max(counts, key=lambda host: (counts[host], host))


def _faults(
    network: Network, programs: Mapping[str, Program], ports: Mapping[str, Sequence[int]]
) -> dict[tuple[str, str], str]:
    """Have every host connect to every other one on a network. Return the ways that fail, in words too."""
    ways = [(there, network.cards[there], port) for there in programs for port in ports[there]]

    def reached_from(here: str) -> list[bool]:
        programs[here].say([(card.address, port) for _, card, port in ways])
        return programs[here].hear(b"[") or [False] * len(ways)

    with ThreadPoolExecutor(max_workers=len(programs)) as pool:
        answers = dict(zip(programs, pool.map(reached_from, programs), strict=True))
    return {
        (here, there): f"{here} cannot reach {there} at {card.address}, port {port} ({card.name}, {card.subnet})"
        for here, reached in answers.items()
        for (there, card, port), is_open in zip(ways, reached, strict=True)
        if not is_open
    }
