"""Time to accuracy of a recipe: several seeds on several numbers of ranks, mean and spread.

    python -m benchmarks.accuracy --data-dir D --runs runs/accuracy                       # 5 seeds on 2 ranks
    python -m benchmarks.accuracy --data-dir D --runs runs/accuracy --ranks 1 --ranks 4   # the same on others
    python -m benchmarks.accuracy --data-dir D --runs runs/accuracy --seeds 2 --name float32 -- --precision float32

Runs that `--runs` already holds are read, not made again, so a table can grow over several calls. A run of the same
name with other options is refused. A line below the table names the runs' commits. Options of `train` follow after
`--`.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, setting
from benchmarks.runs import summary
from hvd_cifar.errors import UserError


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--data-dir", required=True, type=Path)
@click.option("--runs", required=True, type=Path, help="Folder of the runs.")
@click.option("--model", default="fast", show_default=True)
@click.option("--ranks", multiple=True, default=(2,), show_default=True, type=click.IntRange(1))
@click.option("--seeds", default=5, show_default=True, type=click.IntRange(1))
@click.option("--name", default="", help="Name of the variation, where options are given.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@setting.one_line_for_users()
def main(
    data_dir: Path, runs: Path, model: str, ranks: tuple[int, ...], seeds: int, name: str, options: tuple[str, ...]
) -> None:
    """Train what is missing, then print the table."""
    jobs.end_on_signals()
    data_dir = setting.real_data(data_dir)
    commits = set()
    words = " ".join(options) or "defaults"
    print(f"| {model}, {words} | test accuracy, each seed | mean | deviation | of one view | seconds | images/s |")
    print("|---|---|---|---|---|---|---|")
    for count in ranks:
        found = []
        for seed in range(seeds):
            run_dir = runs / f"{model}{name and f'-{name}'}-{count}-{seed}"
            check_options(run_dir, options)
            if not (run_dir / "summary.json").exists():
                common = ["--model", model, "--seed", seed, "--dataset", "cifar10", "--data-dir", data_dir]
                jobs.run(jobs.command(count, *common, "--run-dir", run_dir.absolute(), *options), run_dir / "log")
            found.append(summary(run_dir))
            commits.add(_commit(run_dir))
        print(f"| {count} rank{'s' * (count > 1)} | {_row(found)} |", flush=True)
    print(f"\n{setting.about()}; runs of commits {', '.join(sorted(commits))}")


def _commit(run_dir: Path) -> str:
    return setting.short(json.loads((run_dir / "config.json").read_text())["run"]["git_commit"])


def check_options(run_dir: Path, options: Sequence[str]) -> None:
    """Note the options of a new run. UserError where a run of that name was made with others, or elsewhere."""
    note = run_dir / "options"
    made = (run_dir / "config.json").exists()  # a run that was refused at its start leaves none
    if made and (note.read_text() if note.exists() else None) != shlex.join(options):
        raise UserError(f"{run_dir} was made with other options: give another --name")
    run_dir.mkdir(parents=True, exist_ok=True)
    note.write_text(shlex.join(options))


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
