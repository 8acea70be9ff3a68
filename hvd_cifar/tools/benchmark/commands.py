"""The benchmarks as commands: all ranks measure and judge, rank 0 prints and writes."""

from __future__ import annotations

from pathlib import Path

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.runtime.world import session
from hvd_cifar.tools.benchmark import allreduce, results, step, tables
from hvd_cifar.tools.benchmark.results import AllreduceResult, StepResult
from hvd_cifar.tools.settings import BenchmarkAllreduceSettings, BenchmarkStepSettings


def benchmark_step(settings: BenchmarkStepSettings) -> None:
    """Measure the training step on all ranks of this job.

    Raises:
        UserError: where a setting does not fit the job or the data.
        TrainingError: where the efficiency is below --min-efficiency.
    """
    if settings.min_efficiency is not None and (launched_size() or 1) == 1:
        raise UserError("--min-efficiency: the efficiency of one rank is always 1; start more (-np 2)")
    with session(settings.threads_per_rank) as world:
        found = step.measure(world, settings)
        collectives.on_root(lambda: _tell(found, tables.of_step(found), settings.json_file))
        judge_efficiency(found, settings.min_efficiency)


def judge_efficiency(found: StepResult, wanted: float | None) -> None:
    """TrainingError where the efficiency is below `wanted`."""
    if wanted is not None and found.efficiency.mean < wanted:
        raise TrainingError(
            f"scaling efficiency on {len(found.compute_by_rank)} ranks is {tables.plain(found.efficiency, 4)}, below "
            f"--min-efficiency {wanted:g}: {found.images_per_second.mean:,.0f} images/s, of "
            f"{found.images_per_second_alone.mean:,.0f} without communication"
        )


def benchmark_allreduce(settings: BenchmarkAllreduceSettings) -> None:
    """Measure all-reduces on all ranks of this job.

    Raises:
        UserError: where a setting does not fit the job.
        TrainingError: where a sum is wrong.
    """
    if (launched_size() or 1) == 1:
        raise UserError("one rank alone has nothing to reduce; start more (-np 2)")
    with session() as world:
        found = allreduce.measure(world, settings)
        collectives.on_root(lambda: _tell(found, tables.of_allreduce(found), settings.json_file))
        judge_sums(found)


def judge_sums(found: AllreduceResult) -> None:
    """TrainingError where a value is wrong, naming the first size."""
    wrong = [p for p in found.points if p.wrong_values]
    if wrong:
        others = f", and of {len(wrong) - 1} more sizes" if len(wrong) > 1 else ""
        raise TrainingError(
            f"wrong sums: {wrong[0].wrong_values:,} values of an all-reduce of {wrong[0].bytes:,} bytes{others}; "
            "do not train over this network or MPI"
        )


def _tell(found: StepResult | AllreduceResult, text: str, path: Path | None) -> None:
    terminal.say(text)
    if path:
        results.write(path, found)
