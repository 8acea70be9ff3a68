"""How far apart training on N ranks, and on towers, is from training on one rank: the tables of docs/exactness.md.

    python -m benchmarks.exactness ranks --data-dir D                          # tutorial net
    python -m benchmarks.exactness ranks --data-dir D --model resnet20         # with synchronised batch norm
    python -m benchmarks.exactness digests --data-dir D                        # virtual shards
    python -m benchmarks.exactness costs --data-dir D                          # what the guarantees cost

Each of them starts its runs one after the other; `--keep FOLDER` before the command keeps them.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, runs, setting
from hvd_cifar import config
from hvd_cifar.config import TrainSettings
from hvd_cifar.errors import UserError

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

BATCH = 128
CHECKS = "checks"
FIRST = 20  # steps over which float32 is claimed to agree
QUIET = ("--log-every", 1, "--eval-every", 0, "--checkpoint-every", 10_000)


@click.group(context_settings={"show_default": True})
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@click.pass_context
def main(context: click.Context, keep: Path | None) -> None:
    """Print the tables of docs/exactness.md."""
    jobs.end_on_signals()
    context.obj = context.with_resource(setting.folder_of(keep))


def _common(function: Any) -> Any:
    for option in (
        click.option("--dataset", default="cifar10"),
        click.option("--data-dir", default="~/.cache/hvd_cifar/data"),
        click.option("--model", default="tutorial"),
        click.option("--steps", default=200, type=click.IntRange(1)),
    ):
        function = option(function)
    return function


@main.command()
@_common
@click.option("--precision", multiple=True, default=("float64", "float32"))
@click.option("--ranks", multiple=True, type=int, default=(2, 3, 4, 5))
@click.option("--towers", multiple=True, type=int, default=(2, 4))
@click.option("--learning-rate", help="Learning rate. [default: the recipe's]")
@click.pass_obj
@setting.one_line_for_users()
def ranks(
    folder: Path, /, steps: int, precision: Sequence[str], ranks: Sequence[int], towers: Sequence[int], **given: Any
) -> None:
    """Losses and weights against one rank's."""
    given = {name: value for name, value in given.items() if value} | {"max_steps": steps}
    model = given["model"]
    courses = [_Course(folder, {**given, "precision": kind, "global_batch_size": BATCH}) for kind in precision]
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
        words = jobs.command(ranks, *self.options, *QUIET, *more, "--run-dir", run_dir, "--resume", "never")
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


@main.command()
@_common
@click.option("--shards", default=8)
@click.pass_obj
@setting.one_line_for_users()
def digests(folder: Path, dataset: str, data_dir: str, model: str, steps: int, shards: int) -> None:
    """SHA-256 of the weights with virtual shards."""
    print(f"| {model}, float32, {steps} steps of {BATCH}, {shards} virtual shards | weights_sha256 |")
    print("|---|---|")
    options = ["--model", model, "--dataset", dataset, "--data-dir", data_dir, "--global-batch-size", BATCH]
    options += ["--max-steps", steps, "--virtual-shards", shards, "--resume", "never", "--precision", "float32"]
    size = 1
    while size <= shards:
        run_dir = folder / f"{model}-{shards}-shards-{size}-ranks"
        run_dir.mkdir(exist_ok=True)
        jobs.run(jobs.command(size, *options, *QUIET, "--run-dir", run_dir), run_dir / "log")
        digest = runs.summary(run_dir)["weights_sha256"]
        print(f"| {size} rank{'s' * (size > 1)} | `{digest[:16]}...` |", flush=True)
        size *= 2


@main.command()
@_common
@click.option("--ranks", default=2)
@click.option("--repeats", default=3, type=click.IntRange(1))
@click.pass_obj
@setting.one_line_for_users()
def costs(folder: Path, dataset: str, data_dir: str, model: str, steps: int, ranks: int, repeats: int) -> None:
    """Speed with each guarantee, in turns within each repeat, so that a machine that drifts favours none."""
    ways: dict[str, list[Any]] = {
        "none of these": [],
        "`--sync-batch-norm`": ["--sync-batch-norm"],
        "`--deterministic`": ["--deterministic"],
        f"`--virtual-shards {ranks}`": ["--virtual-shards", ranks],
        "`--virtual-shards 8`": ["--virtual-shards", 8],
        CHECKS: ["--check-sync-every", 10],
    }
    if model == "tutorial":
        del ways["`--sync-batch-norm`"]
    options = ["--model", model, "--dataset", dataset, "--data-dir", data_dir, "--max-steps", steps]
    options += ["--eval-every", 0, "--checkpoint-every", 10_000]
    rates: dict[str, list[float]] = {name: [] for name in ways if name != CHECKS}
    per_check = []
    for repeat in range(repeats):
        for i, (name, more) in enumerate(ways.items()):
            run_dir = folder / f"{model}-cost-{i}-{repeat}"
            if run_dir.exists():
                raise UserError(f"--keep {folder}: it holds an earlier measurement; give another folder")
            run_dir.mkdir()
            jobs.run(jobs.command(ranks, *options, *more, "--run-dir", run_dir), run_dir / "log")
            found = runs.summary(run_dir)
            if name != CHECKS:
                rates[name].append(found["images_per_second"])
            else:  # the rate leaves the checks out
                # After the first step, every 10, and before the last checkpoint.
                per_check.append(found["sync_check_seconds"] / (steps // 10 + 2))
    print(f"| {model}, {ranks} ranks, {steps} steps of {ranks * BATCH}, n = {repeats} | images/s | ratio |")
    print("|---|---|---|")
    base = statistics.median(rates["none of these"])
    for name, of_runs in rates.items():
        low, middle, high = min(of_runs), statistics.median(of_runs), max(of_runs)
        print(f"| {name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {middle / base:.2f} |")
    seconds = statistics.median(per_check)
    share = seconds / (500 * ranks * BATCH / base)
    print(f"\nOne check: {seconds * 1e3:.1f} ms; every 500 steps that is {share:.3%} of the time.")


if __name__ == "__main__":
    main()
