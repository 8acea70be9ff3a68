"""Time to accuracy of `--model fast` beside airbench94 in PyTorch: both from start to end, in turns on one machine.

    python -m benchmarks.peers.whole --data-dir D                # one seed
    python -m benchmarks.peers.whole --data-dir D --seeds 5
    python -m benchmarks.peers.whole --data-dir D --precision float32    # where the processor has no bfloat16

One side runs for --seconds while the other is stopped where it is (SIGSTOP), until both have ended. What counts is each
side's own time, from the start of its first process to the end of its last: imports, compilation, training and the
evaluation. airbench94 averages six views of each test image, hvd_cifar of those that two views leave uncertain. Both
train in --precision: bfloat16, for which both are made, or float32.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks import jobs, setting
from benchmarks.peers import environment, sides
from benchmarks.peers.rates import paired, spread
from benchmarks.peers.turns import Job, Side
from hvd_cifar.tools.benchmark.results import check_writable


class Result(NamedTuple):
    """Of one side's whole run: its own seconds, and accuracies with six views and with one."""

    seconds: float
    accuracy: float
    of_one_view: float


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, default=Path("~/.cache/hvd_cifar/data"), help="Folder with binary CIFAR-10.")
@click.option("--ranks", type=click.IntRange(1), default=2)
@click.option("--precision", type=click.Choice(["float32", "mixed_bfloat16"]), default="mixed_bfloat16")
@click.option("--seeds", type=click.IntRange(1), default=1)
@click.option("--first-seed", type=click.IntRange(0), default=0)
@click.option("--seconds", type=click.FloatRange(1), default=30.0, help="Seconds of a turn.")
@click.option("--environment", "peers", type=Path, default=Path("~/.cache/hvd_cifar/peers"), help="For PyTorch.")
@click.option("--output", type=Path, help="JSON file for every single result.")
@setting.one_line_for_users()
def main(
    data_dir: Path,
    ranks: int,
    precision: str,
    seeds: int,
    first_seed: int,
    seconds: float,
    peers: Path,
    output: Path | None,
) -> None:
    """Measure, then print a table in Markdown."""
    jobs.end_on_signals()
    data_dir = setting.real_data(data_dir)
    check_writable(output)
    python = environment.ensure(peers.expanduser().absolute())
    found: dict[str, list[Result]] = {}
    for seed in range(first_seed, first_seed + seeds):
        with tempfile.TemporaryDirectory() as name:
            folders = {"hvd_cifar": Path(name) / "ours", "airbench94": Path(name) / "airbench"}
            given = ["--data-dir", str(data_dir), "--seed", str(seed)]
            given += ["--precision", precision, "--run-dir"]
            ours = jobs.command(ranks, "--model", "fast", "--dataset", "cifar10", *given, folders["hvd_cifar"])
            theirs = [str(python), "-m", "benchmarks.peers.airbench", *given, str(folders["airbench94"])]
            theirs += ["--threads", str(ranks * sides.threads_of(ranks))]
            both = {"hvd_cifar": ours, "airbench94": theirs}
            spent = in_turns(
                {side: Side(side, [words], [], sides.FAST_BATCH, jobs.environment()) for side, words in both.items()},
                Path(name),
                seconds,
                random.Random(seed),
            )
            for side, folder in folders.items():
                summary = json.loads((folder / "summary.json").read_text())
                six = summary.get("test_accuracy_six_views", summary["test_accuracy"])
                one = summary.get("test_accuracy_of_one_view", summary["test_accuracy"])
                found.setdefault(side, []).append(Result(spent[side], six, one))
                click.echo(f"seed {seed}: {side}: {found[side][-1]}", err=True)
    print("| side | accuracy, six views | one view | seconds | of airbench94's | n |\n|---|---|---|---|---|---|")
    base = [result.seconds for result in found["airbench94"]]
    for side, results in found.items():
        means = [_mean([result[i] for result in results]) for i in (1, 2)]
        times = [result.seconds for result in results]
        print(f"| {side} | {' | '.join(means)} | {spread(times)} | {spread(paired(times, base))} | {seeds} |")
    print(f"\n{setting.about(**environment.versions(python))}")
    if output:
        output.write_text(json.dumps({side: [r._asdict() for r in found[side]] for side in found}, indent=2) + "\n")


def _mean(accuracies: list[float]) -> str:
    """The mean in percent, and the deviation where there are several."""
    percent = [100 * accuracy for accuracy in accuracies]
    deviation = f" ± {statistics.stdev(percent):.2f}" if len(percent) > 1 else ""
    return f"{statistics.mean(percent):.2f}%{deviation}"


def in_turns(given: dict[str, Side], folder: Path, seconds: float, draw: random.Random) -> dict[str, float]:
    """Run sides to their ends, one at a time, in an order drawn anew in each round; each one's own seconds.

    Raises:
        SystemExit: where one fails, with the end of its output.
    """
    spent = dict.fromkeys(given, 0.0)
    with ExitStack() as stack:
        running: dict[str, Job] = {}
        left = list(given)
        while left:
            for name in draw.sample(left, len(left)):
                began = time.monotonic()
                if name in running:
                    running[name].wake()
                else:
                    place = folder / f"{name}-output"
                    place.mkdir()
                    running[name] = stack.enter_context(Job(given[name], place, jobs.CHECKOUT))
                if running[name].ends_within(seconds):
                    left.remove(name)
                spent[name] += time.monotonic() - began
                running[name].pause()
    return spent


if __name__ == "__main__":
    main()
