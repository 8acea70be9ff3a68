"""Marks where the wall time goes, for `reporting.sessions`."""

from __future__ import annotations

import time
from typing import Any

from hvd_cifar.reporting import sessions
from hvd_cifar.training.callbacks import Callback, Run


def make(run: Run) -> Callback:
    """The timekeeper."""
    return Timekeeper()


class Timekeeper(Callback):
    """Marks evaluations, checkpoints and rollbacks in sessions.jsonl."""

    def on_start(self, run: Run) -> None:
        """Mark the end of set-up."""
        self._mark_spans(run)
        run.reporter.mark("start", step=run.step)

    def before_steps(self, run: Run) -> None:
        """Mark evaluation and checkpoint before the first step."""
        self._mark_spans(run)

    def on_step(self, run: Run) -> None:
        """Mark evaluations and checkpoints since the last step."""
        self._mark_spans(run)
        run.reporter.beat()

    def on_rollback(self, run: Run) -> None:
        """Mark the step from which the run continues."""
        self._mark_spans(run)
        run.reporter.mark("rollback", step=run.step)

    def on_end(self, run: Run) -> None:
        """Print the shares of the wall time."""
        run.say(sessions.in_words(run.summary["goodput"]))

    def on_summary(self, run: Run, summary: dict[str, Any]) -> None:
        """Add the shares of the wall time, with evaluations and checkpoints after the last step."""
        self._mark_spans(run)
        end = {"mark": "end", "time": time.time(), "step": run.step}
        summary["goodput"] = sessions.shares([*run.reporter.marks, end])

    def _mark_spans(self, run: Run) -> None:
        for kind, step, began, ended in run.progress.spans:
            run.reporter.mark(kind, time=ended, began=began, step=step)
        run.progress.spans.clear()
