"""Finds ranks whose computation stays slow, and names each once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.step_times import Times

EVERY = 100  # steps between gatherings of the ranks' times; evaluations and checkpoints gather also
FEWEST = 10  # steps in a gathering: the times of fewer are too noisy
IN_A_ROW = 3  # gatherings in which a rank must be slow to be named
SLOWER = 1.5  # a rank is slow if it computes this many times longer than the median


class Seen(NamedTuple):
    """What a rank reports: its host, the seconds of its steps, and of the run's, on average."""

    host: str
    times: Times
    seconds: float


def slow_ranks(ranks: Sequence[Seen]) -> dict[int, str]:
    """The slow ranks of one gathering, each with the reason."""
    steps = [seen.times.compute / seen.times.steps for seen in ranks]
    usual = statistics.median_low(steps)
    return {
        rank: f"compute: {1000 * own:.1f} ms a step, and {1000 * usual:.1f} ms in the median"
        for rank, own in enumerate(steps)
        if own > SLOWER * usual
    }


def make(run: Run) -> Callback:
    """The callback that looks for slow ranks."""
    return Stragglers()


class Stragglers(Callback):
    """Gathers the ranks' times every 100 steps, and at evaluations and checkpoints."""

    def __init__(self) -> None:
        self.gathered_step, self.gathered_seconds = 0, 0.0
        self.in_a_row: dict[int, int] = {}

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

    def _gather(self, run: Run) -> None:
        steps, before = run.step - self.gathered_step, self.gathered_seconds
        if steps < FEWEST:
            return
        run.progress.check_losses()  # waits for the device: the steps are done
        with run.progress.clock.paused():
            self.gathered_step, self.gathered_seconds = run.step, run.progress.clock.seconds
            seconds = (self.gathered_seconds - before) / steps
            ranks = run.ranks.gather(Seen(run.world.host, run.progress.times.take(), seconds))
        run.reporter.ranks(
            run.step,
            hosts=[seen.host for seen in ranks],
            step_seconds=[round(seen.seconds, 6) for seen in ranks],
            compute_seconds=[round(seen.times.compute / seen.times.steps, 6) for seen in ranks],
            wait_seconds=[round(seen.times.wait / seen.times.steps, 6) for seen in ranks],
        )
        slow = slow_ranks(ranks)
        self.in_a_row = {rank: self.in_a_row.get(rank, 0) + 1 for rank in slow} | {
            rank: count for rank, count in self.in_a_row.items() if count >= IN_A_ROW
        }
        for rank, reason in slow.items():
            if self.in_a_row[rank] == IN_A_ROW:
                self.in_a_row[rank] += 1  # so that the rank is named once
                line = f"rank {rank} on {ranks[rank].host} is slow since step {run.step}, {reason}"
                run.warn(line, run.step)
