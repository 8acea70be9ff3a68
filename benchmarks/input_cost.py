"""How much longer a step takes when the pipeline feeds it than when memory does, in pairs.

    python -m benchmarks.input_cost --data-dir D --model tutorial --pairs 40

Both are measured in one job, one right after the other and each of them first in every second pair. `benchmark step`
has the same two among its parts. Only these are measured here, so that a noisy machine can be given more pairs.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import click

from benchmarks import jobs, setting
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.runtime.environment import launched_rank

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

WAYS = ("step", "fed")


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--model", default="tutorial")
@click.option("--precision", default="float32")
@click.option("--batch-size", type=click.IntRange(1), default=128, help="Examples of a rank.")
@click.option("--ranks", type=click.IntRange(1), default=2)
@click.option("--steps", type=click.IntRange(1), default=10, help="Steps in each half of a pair.")
@click.option("--pairs", type=click.IntRange(2), default=40)
@setting.one_line_for_users()
def main(data_dir: Path, model: str, precision: str, batch_size: int, ranks: int, steps: int, pairs: int) -> None:
    """Measure on all ranks, then print a row of Markdown."""
    given = {"model": model, "precision": precision, "batch_size": batch_size, "dataset": "cifar10"}
    settings = make(TrainSettings, {**given, "data_dir": str(setting.real_data(data_dir))})
    if ranks > 1 and launched_rank() is None:
        words = [sys.executable, "-m", "benchmarks.input_cost", *sys.argv[1:]]
        os.chdir(jobs.CHECKOUT)
        os.execvpe("mpirun", [*jobs.launcher(ranks), *words], jobs.environment())
    _measure(settings, steps, pairs)


def _measure(settings: TrainSettings, steps: int, pairs: int) -> None:
    from hvd_cifar.distributed import collectives
    from hvd_cifar.tools.benchmark import job
    from hvd_cifar.tools.benchmark.step import LEAD_IN_OF_INPUT, make_bench

    with job.start(None) as ranks:
        size = ranks.world.size
        bench = make_bench(ranks, settings)
        wall: dict[str, list[float]] = {way: [] for way in WAYS}
        processor: dict[str, list[float]] = {way: [] for way in WAYS}
        for pair in range(pairs + 1):  # the first one traces and warms up
            for way in WAYS if pair % 2 else WAYS[::-1]:
                repeat = bench.repeat(size, way)
                collectives.barrier()
                repeat(LEAD_IN_OF_INPUT)
                cpu, began = time.process_time(), time.perf_counter()
                repeat(steps)
                wall[way].append((time.perf_counter() - began) / steps)
                processor[way].append((time.process_time() - cpu) / steps)
        by_rank = collectives.all_gather_object((wall, processor))
        if ranks.world.is_root:
            print("| model | from memory, ms | fed costs more, time | median | processor time | median | pairs |")
            print("|---|---|---|---|---|---|---|")
            times, cpus = (pairs_of([of_rank[i] for of_rank in by_rank]) for i in (0, 1))
            whole = 1000 * statistics.fmean(step for step, _ in times)
            name = f"`{settings.model}`, {settings.batch_size} a rank"
            print(f"| {name} | {whole:,.1f} | {cost(times)} | {cost(cpus)} | {len(times)} |")
            print(f"\n{size} ranks, {settings.precision}, {steps} steps in each half; {setting.about()}")


def pairs_of(by_rank: list[dict[str, list[float]]]) -> list[tuple[float, float]]:
    """Seconds of a step from memory and of a fed one, in each pair: means over the ranks."""
    means = {way: [statistics.fmean(turn) for turn in zip(*(r[way] for r in by_rank), strict=True)] for way in WAYS}
    return list(zip(means["step"], means["fed"], strict=True))[1:]


def cost(pairs: list[tuple[float, float]]) -> str:
    """How much more the second of a pair is than the first: mean, standard error and median, as cells of a row."""
    more = [100 * (fed / step - 1) for step, fed in pairs]
    error = statistics.stdev(more) / len(more) ** 0.5
    return f"{statistics.fmean(more):.1f} ± {error:.1f}% | {statistics.median(more):.1f}%"


if __name__ == "__main__":
    main()
