"""The benchmarks as commands: all ranks measure and judge, rank 0 prints and writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hvd_cifar.config import (
    BenchmarkAllreduceSettings,
    BenchmarkInputSettings,
    BenchmarkPredictSettings,
    BenchmarkStepSettings,
    make,
)
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.environment import launched_rank, launched_size
from hvd_cifar.tools.benchmark import allreduce, emulate, feeding, job, plots, results, step, tables
from hvd_cifar.tools.benchmark.predict import predict
from hvd_cifar.tools.benchmark.results import AllreduceResult, EmulatedResult, InputResult, PredictResult, StepResult

# Sizes that `predict` measures by itself. A fit of three numbers needs fewer sizes than `allreduce` measures.
SIZES_FOR_A_FIT = {"max_bytes": 2**26, "factor": 4}

Settings = BenchmarkStepSettings | BenchmarkAllreduceSettings | BenchmarkInputSettings | BenchmarkPredictSettings
Result = StepResult | EmulatedResult | AllreduceResult | InputResult | PredictResult


def benchmark_step(settings: BenchmarkStepSettings) -> None:
    """Measure the training step on all ranks of this job.

    Raises:
        UserError: where a setting does not fit the job or the data.
        TrainingError: where the efficiency is below --min-efficiency.
    """
    if settings.min_efficiency is not None and max(settings.ranks or [launched_size() or 2]) == 1:
        raise UserError("--min-efficiency: the efficiency of one rank is always 1; start more (-np 2)")
    with job.start(settings.ranks, threads=settings.threads_per_rank) as ranks:
        collectives.on_root(lambda: _check_outputs(settings))
        if settings.emulate_compute is not None:
            emulated = emulate.measure(ranks, settings)
            collectives.on_root(lambda: _tell(settings, emulated, tables.of_emulated(emulated), lambda path: None))
            return
        found = step.measure(ranks, settings)
        collectives.on_root(
            lambda: _tell(settings, found, tables.of_step(found), lambda path: plots.of_step(found, path))
        )
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
        collectives.on_root(lambda: _check_outputs(settings))
        found = allreduce.measure(ranks, settings)
        collectives.on_root(
            lambda: _tell(settings, found, tables.of_allreduce(found), lambda path: plots.of_allreduce(found, path))
        )
        judge_sums(found)


def judge_sums(found: AllreduceResult) -> None:
    """TrainingError where a value is wrong, naming the first size."""
    wrong = [p for p in found.points if p.wrong_values]
    if wrong:
        first = wrong[0]
        others = f", and in {len(wrong) - 1} more cases" if len(wrong) > 1 else ""
        raise TrainingError(
            f"wrong sums: {first.wrong_values:,} values of an all-reduce of {first.bytes:,} bytes ({first.way}) "
            f"on {first.ranks} ranks{others}; do not train over this network or MPI"
        )


def benchmark_input(settings: BenchmarkInputSettings) -> None:
    """Feed all ranks of this job in three ways.

    Raises:
        UserError: where a setting does not fit the job or the data.
    """
    with job.start((), least=2) as ranks:
        collectives.on_root(lambda: _check_outputs(settings))
        found = feeding.measure(ranks, settings)
        collectives.on_root(
            lambda: _tell(settings, found, tables.of_input(found), lambda path: plots.of_input(found, path))
        )


def benchmark_predict(settings: BenchmarkPredictSettings) -> None:
    """Predict from files, or from what this job measures first.

    Raises:
        UserError: where a file holds no such result, or the job has one rank only.
    """
    if settings.step_file and settings.allreduce_file:
        if launched_rank() in (None, 0):  # no rank needs another one
            _check_outputs(settings)
            of_step, of_allreduce = _read_given(settings)
            assert of_step and of_allreduce
            found = _predict(settings, of_step, of_allreduce)
            _tell(settings, found, tables.of_predict(found), lambda path: plots.of_predict(found, path))
        return
    with job.start(None, least=2, threads=settings.threads_per_rank) as ranks:
        collectives.on_root(lambda: _check_outputs(settings))
        of_step, of_allreduce = collectives.on_root(lambda: _read_given(settings))
        if not of_allreduce:  # a shortage of memory ends the command before the step's minutes of measurement
            advice = "start fewer ranks a host, or give --allreduce FILE, of benchmark allreduce --max-bytes {most}"
            allreduce.check_hosts(ranks, SIZES_FOR_A_FIT["max_bytes"], advice)
        of_step = of_step or step.measure(ranks, settings)
        of_allreduce = of_allreduce or allreduce.measure(ranks, make(BenchmarkAllreduceSettings, SIZES_FOR_A_FIT))
        found = _predict(settings, of_step, of_allreduce)
        collectives.on_root(
            lambda: _tell(settings, found, tables.of_predict(found), lambda path: plots.of_predict(found, path))
        )


def _predict(
    settings: BenchmarkPredictSettings, step: StepResult | EmulatedResult, allreduce: AllreduceResult
) -> PredictResult:
    return predict(step, allreduce, settings.ranks, settings.link, settings.latency, settings.ranks_per_host)


def _read_given(
    settings: BenchmarkPredictSettings,
) -> tuple[StepResult | EmulatedResult | None, AllreduceResult | None]:
    step_file, allreduce_file = settings.step_file, settings.allreduce_file
    return (
        results.read(StepResult | EmulatedResult, step_file, "--step") if step_file else None,
        results.read(AllreduceResult, allreduce_file, "--allreduce") if allreduce_file else None,
    )


def _check_outputs(settings: Settings) -> None:
    """Refuse output files that cannot be written before the measurement, which takes minutes."""
    inputs = [getattr(settings, name, None) for name in ("step_file", "allreduce_file")]
    results.check_writable(settings.json_file, settings.plot_file, inputs=inputs)


def _tell(settings: Settings, found: Result, text: str, plot: Callable[[Path], None]) -> None:
    """Print the text and write the files. Local."""
    terminal.say(text)
    if settings.json_file:
        results.write(settings.json_file, found)
    if settings.plot_file:
        plot(settings.plot_file)
