"""How far apart training on N ranks, and on towers, is from training on one rank: the tables of docs/exactness.md.

    python -m benchmarks.exactness --data-dir D [--model resnet20]      # resnet20: with synchronised batch norm

It starts its runs one after the other; `--keep FOLDER` keeps them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, runs, setting
from hvd_cifar import config
from hvd_cifar.config import TrainSettings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

BATCH = 128
FIRST = 20  # steps over which float32 is claimed to agree
QUIET = ("--log-every", 1, "--eval-every", 0, "--checkpoint-every", 10_000)


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--dataset", default="cifar10")
@click.option("--data-dir", default="~/.cache/hvd_cifar/data")
@click.option("--model", default="tutorial")
@click.option("--steps", default=200, type=click.IntRange(1))
@click.option("--precision", multiple=True, default=("float64", "float32"))
@click.option("--ranks", multiple=True, type=int, default=(2, 3, 4, 5))
@click.option("--towers", multiple=True, type=int, default=(2, 4))
@click.option("--learning-rate", help="Learning rate. [default: the recipe's]")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@setting.one_line_for_users()
def main(
    steps: int, precision: Sequence[str], ranks: Sequence[int], towers: Sequence[int], keep: Path | None, **given: Any
) -> None:
    """Train, and compare losses and weights with one rank's."""
    jobs.end_on_signals()
    given = {name: value for name, value in given.items() if value} | {"max_steps": steps, "global_batch_size": BATCH}
    model = given["model"]
    with setting.folder_of(keep) as folder:
        courses = [_Course(folder, {**given, "precision": kind}) for kind in precision]
        print(f"| {model}, {steps} steps of {BATCH} | precision | loss, first {FIRST} steps | loss, all | weights |")
        print("|---|---|---|---|---|")
        for course in courses:
            alone = course.train(1)
            for n in ranks:
                course.compare(f"{n} ranks", alone, course.train(n))
            if model == "tutorial":  # a tower of a net with batch norm normalises by its own part of the batch
                for n in towers:
                    course.compare(f"{n} towers", alone, course.train_towers(n))
                nudged = course.train_towers(1, nudge=True)
                course.compare("1 tower, one weight moved by its last bit", alone, nudged)


class _Course:
    """Runs of the same settings, and how far they are apart."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = config.make(TrainSettings, given)
        self.options = [word for name, value in given.items() for word in (config.option_name(name), value)]

    def _place(self, name: str) -> Path:
        path = self.folder / f"{self.settings.model}-{self.settings.precision}-{name}"
        path.mkdir(exist_ok=True)
        return path

    def train(self, ranks: int) -> Path:
        run_dir = self._place(f"{ranks}-ranks")
        more = ["--sync-batch-norm"] if self.settings.model != "tutorial" else []
        words = jobs.command(ranks, *self.options, *QUIET, *more, "--run-dir", run_dir)
        jobs.run(words, run_dir / "log")
        return run_dir

    def train_towers(self, towers: int, nudge: bool = False) -> Path:
        run_dir = self._place("nudged" if nudge else f"{towers}-towers")
        words = [sys.executable, "-m", "benchmarks.tower", "--towers", towers, *self.options, "--run-dir", run_dir]
        jobs.run([*map(str, words), *["--nudge"] * nudge], run_dir / "log")
        return run_dir

    def compare(self, what: str, alone: Path, other: Path) -> None:
        losses = runs.losses(alone), runs.losses(other)
        first, whole = (runs.loss_apart(*losses, last) for last in (FIRST, self.settings.max_steps or 0))
        weights = runs.weights_apart(runs.weights(alone), runs.weights(other))
        print(f"| {what} | {self.settings.precision} | {first:.1e} | {whole:.1e} | {weights:.1e} |", flush=True)


if __name__ == "__main__":
    main()
