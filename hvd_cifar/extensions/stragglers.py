"""Finds ranks that stay slow, by computation or network, and names each once."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cifar.runtime.links import Links
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.step_times import Times

EVERY = 100  # steps between gatherings of the ranks' times; evaluations and checkpoints gather also
FEWEST = 10  # steps in a gathering: the times of fewer are too noisy
IN_A_ROW = 3  # gatherings in which a rank must be slow to be named
SLOWER = 1.5  # a rank is slow if it computes this many times longer than the median
WAITING = 0.5  # the network is slow if every rank waits for this share of a step
SLOWER_LINK = 1 / 3  # a link is slow if it has at most this share of the fastest link's rate


@dataclass(frozen=True)
class Seen:
    """What a rank reports: host, address, times, seconds per step, bytes/s of its links by the peer's address."""

    host: str
    address: str
    times: Times
    seconds: float
    links: Mapping[str, float]


def slow_ranks(ranks: Sequence[Seen]) -> dict[int, str]:
    """The slow ranks of one gathering, each with the reason."""
    steps = [seen.times.compute / seen.times.steps for seen in ranks]
    usual = statistics.median_low(steps)
    found = {
        rank: f"compute: {1000 * own:.1f} ms a step, and {1000 * usual:.1f} ms in the median"
        for rank, own in enumerate(steps)
        if own > SLOWER * usual
    }
    waits = [seen.times.wait / (seen.times.compute + seen.times.wait) for seen in ranks]
    if found or min(waits) < WAITING:  # the others wait for a rank that hardly waits, not for the network
        return found
    rates = {(r, other): rate for r, seen in enumerate(ranks) for other, rate in seen.links.items()}
    slow = {ends: rate for ends, rate in rates.items() if rate <= SLOWER_LINK * max(rates.values())} or rates
    addresses = {seen.address: rank for rank, seen in reversed(list(enumerate(ranks)))}
    # The host with the most slow links is slow. With a single slow link both of its hosts are suspects.
    ends = [{ranks[r].host, ranks[addresses[other]].host} for r, other in slow if other in addresses]
    counts = {host: sum(host in pair for pair in ends) for pair in ends for host in pair}
    hosts = {host for host, count in counts.items() if count == max(counts.values())}
    return {
        rank: f"network: links of {seen.host} carry {min(slow.values()) / 1e6:.1f} MB/s, and all ranks wait for "
        f"{min(waits):.0%} of a step"
        for rank, seen in enumerate(ranks)
        if seen.host in hosts
    }


def make(run: Run) -> Callback:
    """The callback that looks for slow ranks."""
    return Stragglers()


class Stragglers(Callback):
    """Gathers the ranks' times every 100 steps, and at evaluations and checkpoints."""

    def __init__(self) -> None:
        self.links = Links()
        self.gathered_step, self.gathered_seconds = 0, 0.0
        self.in_a_row: dict[tuple[int, str], int] = {}

    def on_start(self, run: Run) -> None:
        """Begin to count."""
        self.gathered_step, self.gathered_seconds = run.step, run.progress.clock.seconds

    def on_step(self, run: Run) -> None:
        """Gather where it is due."""
        if run.is_due(EVERY):
            self._gather(run)

    def on_evaluation(self, run: Run, evaluation: Any) -> None:
        """Gather here, where ranks wait for each other anyway."""
        self._gather(run)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """Gather here, where ranks wait for each other anyway."""
        self._gather(run)

    def on_rollback(self, run: Run) -> None:
        """Begin anew: the times so far are of steps that the run makes again."""
        self.on_start(run)
        run.progress.times.take()
        self.links.take()

    def _gather(self, run: Run) -> None:
        steps, before = run.step - self.gathered_step, self.gathered_seconds
        if steps < FEWEST:
            return
        run.progress.check_losses()  # waits for the device: the steps are done
        with run.progress.clock.paused():
            self.gathered_step, self.gathered_seconds = run.step, run.progress.clock.seconds
            seconds = (self.gathered_seconds - before) / steps
            times, links = run.progress.times.take(), self.links.take()
            own = Seen(run.world.host, run.progress.watch.address, times, seconds, links)
            ranks = run.ranks.gather(own)
        run.reporter.ranks(
            run.step,
            hosts=[seen.host for seen in ranks],
            step_seconds=[round(seen.seconds, 6) for seen in ranks],
            compute_seconds=[round(seen.times.compute / seen.times.steps, 6) for seen in ranks],
            wait_seconds=[round(seen.times.wait / seen.times.steps, 6) for seen in ranks],
            link_bytes_per_second=[{other: round(rate) for other, rate in seen.links.items()} for seen in ranks],
        )
        slow = slow_ranks(ranks)
        now = {(rank, reason.partition(":")[0]): reason for rank, reason in slow.items()}
        self.in_a_row = {key: self.in_a_row.get(key, 0) + 1 for key in now} | {
            key: count for key, count in self.in_a_row.items() if count >= IN_A_ROW
        }
        for (rank, kind), reason in now.items():
            if self.in_a_row[rank, kind] == IN_A_ROW:
                self.in_a_row[rank, kind] += 1  # so that the rank is named once
                line = f"rank {rank} on {ranks[rank].host} is slow since step {run.step}, {reason}"
                run.warn(line, run.step)
