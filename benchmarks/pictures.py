"""The picture of a terminal in docs/report.md, from one real run.

    python -m benchmarks.pictures --data-dir D

A run that `--runs` already holds is drawn, not made again. The picture shows the command without the folder of data.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from pathlib import Path

import click
from rich.console import Console

from benchmarks import jobs, setting

WIDTH = 112  # columns of the terminal
COMMAND = "./run.sh -np 2 train --run-dir runs/first"


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--data-dir", required=True, type=Path)
@click.option("--runs", default=Path("runs/pictures"), type=Path, show_default=True, help="Folder of the run.")
@click.option("--output", type=Path, default=jobs.CHECKOUT / "docs" / "pictures", show_default=False)
@setting.one_line_for_users()
def main(data_dir: Path, runs: Path, output: Path) -> None:
    """Train where there is no run yet, then draw."""
    jobs.end_on_signals()
    run_dir, log = runs.absolute() / "first", runs.absolute() / "first.log"
    if not (run_dir / "summary.json").exists():
        runs.mkdir(parents=True, exist_ok=True)
        words = shlex.split(COMMAND)[1:-1]  # as run.sh starts it
        where = [str(run_dir), "--dataset", "cifar10", "--data-dir", str(setting.real_data(data_dir))]
        jobs.run([sys.executable, "-m", "hvd_cifar.launch", *words, *where], log)
    output.mkdir(parents=True, exist_ok=True)
    (output / "terminal.svg").write_text(terminal(shown(log.read_text(), f"{run_dir.parent}/")))


def shown(said: str, folder: str) -> list[str]:
    """The lines of a run's output that fit a picture: all, except log lines in its middle; paths within `runs`."""
    lines = [line.replace(folder, "runs/") for line in said.splitlines()]
    steps = [i for i, line in enumerate(lines) if "images/s" in line and "loss = " in line]
    left_out = set(steps[2:-2])
    kept = [line for i, line in enumerate(lines) if i not in left_out]
    at = kept.index(lines[steps[1]]) + 1 if len(steps) > 4 else None
    return [*kept[:at], "...", *kept[at:]] if at else kept


def terminal(lines: list[str]) -> str:
    """A terminal with the command and its output, as SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor", force_terminal=True)
    console.print(f"[bold green]$[/] {COMMAND}", highlight=False)
    for line in lines:
        console.print(line, markup=False, highlight=False)
    drawn = console.export_svg(title="hvd_cifar", unique_id="hvd")
    return re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # fonts of another site


if __name__ == "__main__":
    main()
