"""Which slots of which hosts an elastic job may use: pure bookkeeping of losses and cool-downs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from hvd_cifar.errors import UserError
from hvd_cifar.launch.cluster.hosts import Host, count


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
        """The largest allowed number up to `slots`, without regard to `least`; 0: there is none."""
        sizes = range(min(slots, self.most), 0, -1)
        return next((size for size in sizes if self.shards is None or self.shards % size == 0), 0)


def parse_sizes(text: str) -> Sizes:
    """`MIN:MAX` as sizes. Raises UserError."""
    least, colon, most = text.partition(":")
    what = f"--elastic {text}"
    if not colon:
        raise UserError(f"{what}: write MIN:MAX, such as 2:8")
    sizes = Sizes(count(least, f"{what}: MIN"), count(most, f"{what}: MAX"))
    if sizes.least > sizes.most:
        raise UserError(f"{what}: MIN is more than MAX")
    return sizes


def first_slots(hosts: Sequence[Host], ranks: int) -> tuple[Host, ...]:
    """The first `ranks` slots of hosts, without hosts that have none of them."""
    found = []
    for host in hosts:
        taken = min(ranks, host.slots)
        ranks -= taken
        if taken:
            found.append(Host(host.name, taken))
    return tuple(found)


def slots_of(hosts: Sequence[Host]) -> int:
    """All slots of hosts."""
    return sum(host.slots for host in hosts)


@dataclass
class Roster:
    """What was lost, and when it may be used again.

    first, longest: seconds that a slot or a host rests after its first loss, and at most; each loss doubles them.
    """

    first: float
    longest: float
    _losses: Counter[str] = field(default_factory=Counter)
    _resting: list[tuple[float, str, bool]] = field(default_factory=list)  # until when, host, all of it or one slot

    def lose(self, host: str, whole: bool, now: float) -> float:
        """Note the loss of a host, or of one rank on it; the seconds that its slots rest."""
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
