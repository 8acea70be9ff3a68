"""What validation beside training costs the rank that trains: pairs of windows of steps, with and without it.

    python -m benchmarks.validation --data-dir D --pairs 20

One rank trains on one core, one validation rank evaluates on another. Every second window begins with a snapshot, which
the validation rank evaluates on the whole test set meanwhile. A window lasts until the first step of the next one.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click

from benchmarks import jobs, setting
from hvd_cifar import Callback, Run
from hvd_cifar.errors import UserError
from hvd_cifar.reporting import goodput
from hvd_cifar.runtime.environment import BESIDE, Beside

WINDOW = "HVD_CIFAR_BENCHMARK_WINDOW"  # steps of a window


class Windows(Callback):
    """Notes the clocks before the first step of each window, and writes them at the end."""

    def __init__(self) -> None:
        self.clocks: list[tuple[float, float]] = []  # wall and processor time, s

    def on_step(self, run: Run) -> None:
        """Note the clocks where the next step begins a window."""
        if (run.step + 1) % int(os.environ[WINDOW]) == 0:
            self.clocks.append((time.perf_counter(), time.process_time()))

    def on_end(self, run: Run) -> None:
        """Write what was noted."""
        (run.run_dir / "windows.json").write_text(json.dumps(self.clocks))


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--model", default="tutorial")
@click.option("--precision", default="float32")
@click.option("--batch-size", type=click.IntRange(1), default=128)
@click.option("--steps", type=click.IntRange(10), default=100, help="Steps in each window.")
@click.option("--pairs", type=click.IntRange(2), default=20)
@setting.one_line_for_users()
def main(data_dir: Path, model: str, precision: str, batch_size: int, steps: int, pairs: int) -> None:
    """Run the two jobs as the launcher does, each on a core of its own, and print a row of Markdown."""
    jobs.end_on_signals()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise UserError("each of the two ranks needs a core of its own, and there is one: take another machine")
    training, other = cores[:2]
    data = setting.real_data(data_dir)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        words = jobs.command(1, "--model", model, "--precision", precision, "--batch-size", batch_size)
        words += ["--dataset", "cifar10", "--data-dir", str(data), "--run-dir", str(run_dir)]
        words += ["--eval-every", str(2 * steps), "--max-steps", str(2 * steps * (pairs + 1)), "--epochs", "10000"]
        words += ["--log-every", "100000", "--checkpoint-every", "100000", "--callbacks", f"{__file__}:Windows"]
        env = {"HVD_CIFAR_TERMINAL": "0", WINDOW: str(steps)}
        validate = [sys.executable, "-m", "hvd_cifar", "validate", "--run-dir", str(run_dir)]
        log = Path(folder) / "validator.log"
        validator = jobs.start(["taskset", "-c", str(other), *validate], log, {**env, BESIDE: str(Beside(1, 0))})
        try:
            pinned = ["taskset", "-c", str(training), *words]
            jobs.run(pinned, Path(folder) / "log", {**env, BESIDE: str(Beside(0, 1))})
        finally:
            validator.terminate()  # it tidies up, where it still runs
            with suppress(subprocess.TimeoutExpired):
                validator.wait(10)
            jobs.kill(validator)
        said = log.read_text().strip()[-500:]
        clocks = json.loads((run_dir / "windows.json").read_text())
        events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        marks = goodput.read((run_dir / "sessions.jsonl").read_text())
    print("| model | images/s without | with one: time | median | processor time | median | pairs |")
    print("|---|---|---|---|---|---|---|")
    seconds = [[after[i] - before[i] for before, after in zip(clocks, clocks[1:], strict=False)] for i in (0, 1)]
    # The first window is left out. Then one with an evaluation and one without follow each other.
    wall, processor = (list(zip(all_of_it[2::2], all_of_it[1::2], strict=True)) for all_of_it in seconds)
    rate = batch_size * steps / statistics.median(without for without, _ in wall)
    print(f"| `{model}`, {precision}, {batch_size} | {rate:,.0f} | {cost(wall)} | {cost(processor)} | {len(wall)} |")
    if not any("at_step" in e for e in events):
        raise UserError(f"the validation rank evaluated nothing: {said}")
    late = {e["step"]: e["at_step"] - e["step"] for e in events if "at_step" in e}  # by step of the snapshot
    stops = [1000 * (m["time"] - m["began"]) for m in marks if m["mark"] == "evaluation" and m["step"] in late]
    print(f"\n{steps} steps in a window; results came {min(late.values())} to {max(late.values())} steps late.")
    print(f"A snapshot stops training for {statistics.median(stops):.0f} ms in the median, at most {max(stops):.0f}.")
    print(setting.about())


def cost(pairs: list[tuple[float, float]]) -> str:
    """How much more the second of a pair is than the first: mean, standard error and median, as cells of a row."""
    more = [100 * (with_it / without - 1) for without, with_it in pairs]
    error = statistics.stdev(more) / len(more) ** 0.5
    return f"{statistics.fmean(more):.1f} ± {error:.1f}% | {statistics.median(more):.1f}%"


if __name__ == "__main__":
    main()
