"""A run that is killed five times, and resumed on another number of ranks each time, beside an undisturbed run.

    python -m benchmarks.resume --data-dir D --plot docs/pictures/resume.png

SIGKILL comes to the launcher and all ranks at once, at a random moment. In float64 the two curves are compared; with
--virtual-shards, in float32, the weights they end with have to be the same to the bit.
"""

from __future__ import annotations

import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from benchmarks import jobs, runs, setting
from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.results import check_writable

SIZES = (2, 3, 1, 4, 2, 1)  # ranks of each part
SHARDED_SIZES = (2, 4, 1, 8, 2, 1)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--dataset", default="cifar10", show_default=True)
@click.option("--data-dir", default="~/.cache/hvd_cifar/data", show_default=True)
@click.option("--model", default="tutorial", show_default=True)
@click.option("--steps", default=300, show_default=True, type=click.IntRange(10))
@click.option("--batch", default=96, show_default=True, help="Global batch size.")
@click.option("--seed", type=int, help="Seed of the moments of the kills.")
@click.option("--virtual-shards", type=int, help="Compare bits in float32 instead of losses in float64.")
@click.option("--keep", type=Path, help="Folder for the runs; without it they are removed.")
@click.option("--plot", type=Path, help="Write a plot of both curves.")
@click.pass_context
@setting.one_line_for_users()
def main(
    context: click.Context,
    dataset: str,
    data_dir: str,
    model: str,
    steps: int,
    batch: int,
    seed: int | None,
    virtual_shards: int | None,
    keep: Path | None,
    plot: Path | None,
) -> None:
    """Run both, compare, and print."""
    jobs.end_on_signals()
    check_writable(plot)
    folder = keep or Path(context.with_resource(tempfile.TemporaryDirectory()))
    seed = random.randrange(1000) if seed is None else seed
    options: list[Any] = ["--dataset", dataset, "--data-dir", data_dir, "--model", model, "--max-steps", steps]
    options += ["--global-batch-size", batch, "--checkpoint-every", 25, "--log-every", 1, "--eval-every", 0]
    options += ["--virtual-shards", virtual_shards] if virtual_shards else []
    options += ["--precision", "float32" if virtual_shards else "float64"]
    whole, cut = folder / "whole", folder / "cut"
    for run_dir in (whole, cut):
        if run_dir.exists():
            raise UserError(f"--keep {folder}: it holds an earlier measurement; give another folder")
        run_dir.mkdir(parents=True)

    sizes = SHARDED_SIZES if virtual_shards else SIZES
    jobs.run(jobs.command(sizes[0], *options, "--run-dir", whole), whole / "log")
    kills = _train_with_kills(options, cut, sizes, steps, random.Random(seed))

    for run_dir in (whole, cut):
        assert runs.steps(run_dir) == list(range(1, steps + 1)), "a step is missing, or was logged twice"
    one, other = runs.losses(whole), runs.losses(cut)
    print(f"{model}, {steps} steps of {batch}, seed {seed}")
    for n, killed, resumed in kills:
        print(f"  {n} ranks, killed after step {killed}, resumed from step {resumed}")
    print(f"  {sizes[len(kills)]} ranks to the end")
    print(f"largest relative difference of a loss: {runs.loss_apart(one, other, steps):.1e}")
    digests = [runs.summary(run_dir)["weights_sha256"] for run_dir in (whole, cut)]
    same = "the same" if len({*digests}) == 1 else "different"
    print(f"weights_sha256 {digests[0][:16]}..., {digests[1][:16]}...: {same}")
    if plot:
        _plot(plot, one, other, kills, sizes, f"{model}, {steps} steps of {batch}")


def _train_with_kills(
    options: list[Any], run_dir: Path, sizes: tuple[int, ...], steps: int, chance: random.Random
) -> list[tuple[int, int, int]]:
    """For each kill: the ranks, the last step on record, and the step of the checkpoint to go on from."""
    from hvd_cifar.training.checkpoint import find

    kills = []
    moments = sorted(chance.sample(range(steps // 20, steps - steps // 20), len(sizes) - 1))
    for n, moment in zip(sizes[:-1], moments, strict=True):
        moment = max(moment, 1 + max(runs.losses(run_dir), default=0))  # after a step of this part
        job = jobs.start(jobs.command(n, *options, "--run-dir", run_dir), run_dir / "log")
        try:
            while job.poll() is None and max(runs.losses(run_dir), default=0) < moment:
                time.sleep(0.02)
            time.sleep(chance.random() * 0.3)  # in the middle of whatever it is doing
            if job.poll() is not None:
                raise UserError("the run ended before it was killed: give more --steps, or --keep and see its log")
        finally:
            jobs.kill(job)
        newest = find(run_dir)
        saved = int(newest.name.removeprefix("step-")) if newest else 0
        kills.append((n, max(runs.losses(run_dir)), saved))
    jobs.run(jobs.command(sizes[-1], *options, "--run-dir", run_dir), run_dir / "last.log")
    return kills


def _plot(
    path: Path,
    one: dict[int, float],
    other: dict[int, float],
    kills: list[tuple[int, int, int]],
    sizes: tuple[int, ...],
    title: str,
) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(one), list(one.values()), color="0.6", linewidth=4, label=f"left alone, {sizes[0]} ranks")
    edges = [0, *(saved for *_, saved in kills), max(other)]
    for n, (begin, end) in zip(sizes, pairwise(edges), strict=True):
        part = {step: loss for step, loss in other.items() if begin <= step <= end}
        if part:
            ranks = f"{n} rank{'s' * (n > 1)}"
            axes.plot(list(part), list(part.values()), linewidth=1.2, label=f"steps {begin + 1} to {end}: {ranks}")
    for _, killed, _ in kills:
        axes.axvline(killed, color="black", linewidth=0.8, linestyle=":")
    axes.set(xlabel="step", ylabel="loss of the global batch", title=f"{title}; dotted: SIGKILL")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
