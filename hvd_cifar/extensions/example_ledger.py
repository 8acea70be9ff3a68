"""--record-examples: which examples each rank used in each step, as examples.jsonl."""

from __future__ import annotations

from hvd_cifar import fields
from hvd_cifar.training.callbacks import Callback, Run

FILE = "examples.jsonl"


class Settings(fields.Settings):
    record_examples: bool = False
    """Write to examples.jsonl which examples each rank used in each step."""


def make(run: Run) -> Callback | None:
    return ExampleLedger() if run.options(Settings).record_examples else None


class ExampleLedger(Callback):
    """Gathers the ranks' examples at log lines and checkpoints, and at each step where every result is fetched."""

    def __init__(self) -> None:
        self.used: list[tuple[int, list[int]]] = []  # by step, not yet written

    def on_start(self, run: Run) -> None:
        # An interrupted run left entries of later steps.
        run.ranks.on_root(lambda: run.reporter.resume_file(FILE, run.step))

    def on_step(self, run: Run) -> None:
        self.used.append((run.step, run.progress.examples))
        if run.progress.fetches_each_step:  # the step's state is copied next, and no copied step may lack its record
            self.on_log(run)
            run.ranks.barrier()

    def on_log(self, run: Run) -> None:
        by_rank = run.ranks.all_gather_object(self.used)
        for i, (step, _) in enumerate(self.used):
            run.reporter.append_line(FILE, {"step": step, "ranks": [used[i][1] for used in by_rank]})
        self.used.clear()

    def before_checkpoint(self, run: Run) -> None:
        self.on_log(run)
