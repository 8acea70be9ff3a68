"""Finds ranks whose computation stays slow, and names each once."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hvd_cifar.training.callbacks import Callback, Run

EVERY = 100  # steps between gatherings of the ranks' times; evaluations and checkpoints gather also
FEWEST = 10  # steps in a gathering: the times of fewer are too noisy
IN_A_ROW = 3  # gatherings in which a rank must be slow to be named
SLOWER = 1.5  # a rank is slow if it computes this many times longer than the median


class Seen(NamedTuple):
    """What a rank reports: its host, and seconds of a step, on average, in which it computes and waits for others."""

    host: str
    compute: float
    wait: float


def slow_ranks(ranks: Sequence[Seen]) -> dict[int, str]:
    """The slow ranks of one gathering, each with the reason."""
    usual = statistics.median_low(seen.compute for seen in ranks)
    return {
        rank: f"compute: {1000 * seen.compute:.1f} ms a step, and {1000 * usual:.1f} ms in the median"
        for rank, seen in enumerate(ranks)
        if seen.compute > SLOWER * usual
    }


def make(run: Run) -> Callback:
    return Stragglers()


class Stragglers(Callback):
    """Gathers the ranks' times every 100 steps, and at evaluations and checkpoints, where ranks wait anyway."""

    def __init__(self) -> None:
        self.step, self.seconds = 0, 0.0  # of the last gathering
        self.in_a_row: dict[int, int] = {}  # gatherings in which a rank was slow, without end once it is named

    def on_start(self, run: Run) -> None:
        self.step, self.seconds = run.step, run.progress.clock.seconds
        run.progress.waits.take()

    def on_step(self, run: Run) -> None:
        if run.is_due(EVERY):
            self._gather(run)

    def on_evaluation(self, run: Run, evaluation: Any) -> None:
        self._gather(run)

    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._gather(run)

    def _gather(self, run: Run) -> None:
        steps, before = run.step - self.step, self.seconds
        if steps < FEWEST:
            return
        run.progress.check_losses()  # waits for the device: the steps are done
        with run.progress.clock.paused():
            self.step, self.seconds = run.step, run.progress.clock.seconds
            wait = run.progress.waits.take() / steps
            compute = max(1e-9, (self.seconds - before) / steps - wait)
            ranks = run.ranks.all_gather_object(Seen(run.world.host, compute, wait))
        run.reporter.ranks(
            run.step,
            hosts=[seen.host for seen in ranks],
            compute_seconds=[round(seen.compute, 6) for seen in ranks],
            wait_seconds=[round(seen.wait, 6) for seen in ranks],
        )
        slow = slow_ranks(ranks)
        self.in_a_row = {rank: count for rank, count in self.in_a_row.items() if rank in slow or count >= IN_A_ROW}
        for rank, reason in slow.items():
            self.in_a_row[rank] = self.in_a_row.get(rank, 0) + 1
            if self.in_a_row[rank] == IN_A_ROW:
                run.warn(f"rank {rank} on {ranks[rank].host} is slow since step {run.step}, {reason}", run.step)
