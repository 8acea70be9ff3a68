"""What TensorBoard's summaries cost: blocks of training steps with the defaults and with --summary-every 0, in turns.

    ./run.sh -np 2 python -m benchmarks.summaries --data-dir D --model tutorial --pairs 5 --json summaries.json

Two runs take turns in one process, so both see the same neighbours. A block has 100 steps, one of which is summarised.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

STEPS = 100


def _blocks(trainer: Any, step: int) -> Callable[[int], tuple[float, float]]:
    """Open a run; a function makes so many steps of it and returns their wall clock and this rank's processor time."""
    from hvd_cifar.training.step import Notes

    batches, progress = trainer.batches(step), trainer.progress
    trainer.reporter.open(step)
    trainer.tell("on_start")

    def block(steps: int) -> tuple[float, float]:
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            micro_batches = next(batches)
            progress.add(micro_batches, trainer.step(progress.step, micro_batches, 1.0, Notes()))
            trainer.tell("on_step")
        progress.check_losses()
        return time.perf_counter() - began, time.process_time() - worked

    return block


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="With the embedded set.")
@click.option("--model", default="tutorial")
@click.option("--batch-size", type=click.IntRange(1), help="Of a rank.")
@click.option("--pairs", type=click.IntRange(2), default=5)
@click.option("--json", "json_file", type=Path, help="File to write the seconds to.")
def main(data_dir: Path, model: str, batch_size: int | None, pairs: int, json_file: Path | None) -> None:
    """Measure, and print the share that summaries add to a block."""
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.assemble import assemble
    from hvd_cifar.training.trainer import OfUser

    given = {"model": model, "dataset": "synthetic", "data_dir": str(data_dir), "batch_size": batch_size}
    given |= {"eval_every": 0, "checkpoint_every": 10**6, "check_sync_every": 0, "epochs": 1000}
    with session() as world, tempfile.TemporaryDirectory() as folder:
        run = {
            name: _blocks(
                assemble(make(TrainSettings, {**given, **way, "run_dir": f"{folder}/{name}"}), world, OfUser()), 0
            )
            for name, way in (("without", {"summary_every": 0}), ("with", {}))
        }
        for block in run.values():
            block(STEPS // 2)  # traces, and the summary of the first step; that of step 100 is within the next block
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in run}
        for pair in range(pairs):
            for name in ("with", "without")[:: 1 - 2 * (pair % 2)]:
                collectives.barrier()
                seconds[name].append(run[name](STEPS))
        if not world.is_root:
            return
        for place, kind in enumerate(("wall clock", "processor time of rank 0")):
            ratios = [a[place] / b[place] - 1 for a, b in zip(seconds["with"], seconds["without"], strict=True)]
            base = statistics.median(b[place] for b in seconds["without"])
            print(
                f"{kind}: {base:.2f} s a block without; summaries add {statistics.median(ratios):+.2%} in the median",
                end="",
            )
            print(f" of {pairs} pairs, {min(ratios):+.2%} to {max(ratios):+.2%}")
        if json_file:
            json_file.write_text(json.dumps({"model": model, "ranks": world.size, "seconds": seconds}, indent=2) + "\n")


if __name__ == "__main__":
    main()
