"""Which slots an elastic job may use: bookkeeping of losses and cool-downs, without input or output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_cifar.launch.cluster.hosts import Host


@dataclass(frozen=True)
class Sizes:
    """The numbers of ranks that an elastic job may have.

    least, most: bounds.
    shards: --virtual-shards, which the number must divide; None: any number.
    """

    least: int
    most: int
    shards: int | None = None

    def fitting(self, slots: int) -> int:
        """The largest number of ranks up to `slots` that `most` and `shards` allow; 0: there is none."""
        sizes = range(min(slots, self.most), 0, -1)
        return next((size for size in sizes if self.shards is None or self.shards % size == 0), 0)


def first_slots(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """The first `ranks` slots of the hosts."""
    found = []
    for host in hosts:
        taken = min(ranks, host.slots)
        ranks -= taken
        if taken:
            found.append(Host(host.name, taken))
    return tuple(found)


def slots_of(hosts: Sequence[Host]) -> int:
    """The number of slots of all hosts."""
    return sum(host.slots for host in hosts)


@dataclass
class Roster:
    """Lost slots and hosts, and when they may be used again.

    first: seconds for which a slot or host rests after the first loss on its host. Each further loss doubles them.
    longest: the most seconds.
    """

    first: float
    longest: float
    _losses: Counter[str] = field(default_factory=Counter)
    _resting: list[tuple[float, str, bool]] = field(default_factory=list)  # end of rest, host, whole host or one slot

    def lose(self, host: str, whole: bool, now: float) -> float:
        """Record the loss of a whole host, or of one rank on it. Return the seconds for which it rests."""
        seconds = min(self.longest, self.first * 2.0 ** self._losses[host])
        self._losses[host] += 1
        self._resting.append((now + seconds, host, whole))
        return seconds

    def usable(self, hosts: Sequence[Host], now: float) -> tuple[Host, ...]:
        """The hosts and slots that do not rest."""
        self._resting = [entry for entry in self._resting if entry[0] > now]
        whole = {host for _, host, all_of_it in self._resting if all_of_it}
        single = Counter(host for _, host, all_of_it in self._resting if not all_of_it)
        left = (Host(host.name, host.slots - single[host.name]) for host in hosts if host.name not in whole)
        return tuple(host for host in left if host.slots > 0)
