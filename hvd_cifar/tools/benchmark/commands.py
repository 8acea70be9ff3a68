"""The benchmarks as commands: all ranks measure and judge, rank 0 prints and writes."""

from __future__ import annotations

from pathlib import Path

from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.tools.benchmark import allreduce, job, results, step, tables
from hvd_cifar.tools.benchmark.results import AllreduceResult, StepResult
from hvd_cifar.tools.settings import BenchmarkAllreduceSettings, BenchmarkStepSettings


def benchmark_step(settings: BenchmarkStepSettings) -> None:
    """Measure the training step on all ranks of this job.

    Raises:
        UserError: where a setting does not fit the job or the data.
        TrainingError: where the efficiency is below --min-efficiency.
    """
    if settings.min_efficiency is not None and max(settings.ranks or [launched_size() or 2]) == 1:
        raise UserError("--min-efficiency: the efficiency of one rank is always 1; start more (-np 2)")
    with job.start(settings.ranks, threads=settings.threads_per_rank) as ranks:
        collectives.on_root(lambda: results.check_writable(settings.json_file))
        found = step.measure(ranks, settings)
        collectives.on_root(lambda: _tell(found, tables.of_step(found), settings.json_file))
        judge_efficiency(found, settings.min_efficiency)


def judge_efficiency(found: StepResult, wanted: float | None) -> None:
    """TrainingError where the efficiency on the most ranks is below `wanted`."""
    world = max(found.worlds, key=lambda world: world.ranks)
    if wanted is not None and world.efficiency.mean < wanted:
        raise TrainingError(
            f"scaling efficiency on {world.ranks} ranks is {tables.plain(world.efficiency, 4)}, below --min-efficiency "
            f"{wanted:g}: {world.images_per_second.mean:,.0f} images/s, of "
            f"{world.images_per_second_alone.mean:,.0f} without communication"
        )


def benchmark_allreduce(settings: BenchmarkAllreduceSettings) -> None:
    """Measure all-reduces on all ranks of this job.

    Raises:
        UserError: where a setting does not fit the job.
        TrainingError: where a sum is wrong.
    """
    with job.start(settings.ranks, least=2) as ranks:
        collectives.on_root(lambda: results.check_writable(settings.json_file))
        found = allreduce.measure(ranks, settings)
        collectives.on_root(lambda: _tell(found, tables.of_allreduce(found), settings.json_file))
        judge_sums(found)


def judge_sums(found: AllreduceResult) -> None:
    """TrainingError where a value is wrong, naming the first size."""
    wrong = [p for p in found.points if p.wrong_values]
    if wrong:
        first = wrong[0]
        others = f", and in {len(wrong) - 1} more cases" if len(wrong) > 1 else ""
        raise TrainingError(
            f"wrong sums: {first.wrong_values:,} values of an all-reduce of {first.bytes:,} bytes "
            f"on {first.ranks} ranks{others}; do not train over this network or MPI"
        )


def _tell(found: StepResult | AllreduceResult, text: str, path: Path | None) -> None:
    """Print the text and write the file. Local."""
    terminal.say(text)
    if path:
        results.write(path, found)
