"""Time to accuracy of a recipe: several seeds, mean and spread.

    python -m benchmarks.accuracy --data-dir D --runs runs/accuracy                       # 5 seeds on 2 ranks
    python -m benchmarks.accuracy --data-dir D --runs runs/accuracy --seeds 2 --name float32 -- --precision float32

Runs that `--runs` already holds are read, not made again, so a table can grow over several calls. Options of `train`
follow after `--`; runs with other options need another `--name`.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, setting
from benchmarks.runs import summary


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--data-dir", required=True, type=Path)
@click.option("--runs", required=True, type=Path, help="Folder of the runs.")
@click.option("--model", default="fast", show_default=True)
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--name", default="", help="Name of the variation, where options are given.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@setting.one_line_for_users()
def main(data_dir: Path, runs: Path, model: str, ranks: int, seeds: int, name: str, options: tuple[str, ...]) -> None:
    """Train what is missing, then print the table."""
    jobs.end_on_signals()
    common = ["--model", model, "--dataset", "cifar10", "--data-dir", setting.real_data(data_dir)]
    found = []
    for seed in range(seeds):
        run_dir = runs.absolute() / f"{model}{name and f'-{name}'}-{ranks}-{seed}"
        run_dir.mkdir(parents=True, exist_ok=True)
        if not (run_dir / "summary.json").exists():
            jobs.run(jobs.command(ranks, *common, "--seed", seed, "--run-dir", run_dir, *options), run_dir / "log")
        found.append(summary(run_dir))
    words = " ".join(options) or "defaults"
    print(f"| {model}, {words} | test accuracy, each seed | mean | deviation | of one view | seconds | images/s |")
    print(f"|---|---|---|---|---|---|---|\n| {ranks} rank{'s' * (ranks > 1)} | {_row(found)} |\n\n{setting.about()}")


def _row(found: list[dict[str, Any]]) -> str:
    percent = [100 * summary["test_accuracy"] for summary in found]
    deviation = f"{statistics.stdev(percent):.2f}" if len(percent) > 1 else "-"
    one_view = statistics.mean(100 * summary["test_accuracy_of_one_view"] for summary in found)
    seconds = statistics.mean(summary["training_seconds"] for summary in found)
    rate = statistics.mean(summary["images_per_second"] for summary in found)
    each = ", ".join(f"{p:.2f}" for p in percent)
    return f"{each} | {statistics.mean(percent):.2f}% | {deviation} | {one_view:.2f}% | {seconds:.0f} | {rate:,.0f}"


if __name__ == "__main__":
    main()
