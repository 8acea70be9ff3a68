"""What TensorBoard's summaries cost: blocks of training steps, in turns, as a share of 100 steps.

    ./run.sh -np 2 python -m benchmarks.summaries --data-dir D --model tutorial --repeats 6 --json summaries.json

Two runs take turns in one process, so that other work on the machine affects both: one with --summary-every 0, and one
whose blocks of steps have no summary and one summary in turn.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click

EVERY = 100  # steps between summaries, by default


class Run:
    """A run that makes blocks of steps."""

    def __init__(self, trainer: Any) -> None:
        from hvd_cifar.extensions.tensorboard import Summaries

        self.trainer, self.batches = trainer, trainer.batches(0)
        (self.summaries,) = (c for c in trainer.callbacks if isinstance(c, Summaries))
        trainer.reporter.open(0)
        trainer.tell("on_start")

    def block(self, steps: int, summary: bool) -> tuple[float, float]:
        """Wall clock and this rank's processor time of steps, the first of which has a summary."""
        from hvd_cifar.training.step import Notes

        trainer, progress = self.trainer, self.trainer.progress
        began, worked = time.perf_counter(), time.process_time()
        if summary:
            assert self.summaries.record is not None, "--summary-every is not 0"
            self.summaries.record.ask()
            self.summaries.asked_step = progress.step + 1
        for _ in range(steps):
            micro_batches = next(self.batches)
            progress.add(micro_batches, trainer.step(progress.step, micro_batches, 1.0, Notes()))
            trainer.tell("on_step")
        progress.check_losses()
        return time.perf_counter() - began, time.process_time() - worked


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Embedded set: folder.")
@click.option("--model", default="tutorial")
@click.option("--batch-size", type=click.IntRange(1), help="Examples of a rank.")
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps of a block.")
@click.option("--repeats", type=click.IntRange(2), default=6)
@click.option("--json", "json_file", type=Path, help="File to write the seconds to.")
def main(data_dir: Path, model: str, batch_size: int | None, steps: int, repeats: int, json_file: Path | None) -> None:
    """Measure, and print the share that summaries add to 100 steps."""
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.train import assemble
    from hvd_cifar.training.work import UserObjects

    given = {"model": model, "dataset": "synthetic", "data_dir": str(data_dir), "batch_size": batch_size}
    given |= {"eval_every": 0, "checkpoint_every": 10**6, "check_sync_every": 0, "epochs": 1000}
    kinds = {"without": (0, False), "no summary": (10**6, False), "summary": (10**6, True)}
    with session() as world, tempfile.TemporaryDirectory() as folder:
        runs = {}
        for every in (0, 10**6):
            settings = make(TrainSettings, {**given, "summary_every": every, "run_dir": f"{folder}/{every}"})
            runs[every] = Run(assemble(settings, world, UserObjects()))
            runs[every].block(3, summary=False)
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
        for _ in range(repeats):
            for kind, (every, summary) in kinds.items():
                collectives.barrier()
                taken[kind].append(runs[every].block(steps, summary))
        if world.is_root:
            for place, clock in enumerate(("wall clock", "processor time of rank 0")):
                _tell(clock, steps, *([block[place] for block in taken[kind]] for kind in kinds))
            if json_file:
                json_file.write_text(json.dumps({"model": model, "ranks": world.size, "taken": taken}, indent=2) + "\n")


def _tell(clock: str, steps: int, without: list[float], between: list[float], summary: list[float]) -> None:
    step = statistics.median(without) / steps
    idle = [(b - a) / steps for a, b in zip(without, between, strict=True)]
    whole = [b - a for a, b in zip(between, summary, strict=True)]
    shares = [(EVERY * i + w) / (EVERY * step) for i, w in zip(idle, whole, strict=True)]
    print(
        f"{clock}, n {len(shares)}: a step {1e3 * step:.1f} ms; a step that could have a summary "
        f"{1e3 * statistics.median(idle):+.2f} ms; a summary {1e3 * statistics.median(whole):+.1f} ms; together "
        f"{statistics.median(shares):+.2%} of {EVERY} steps, {min(shares):+.2%} to {max(shares):+.2%}"
    )


if __name__ == "__main__":
    main()
