"""The same training at any number of ranks: losses and weights against one rank's, and losses against those on record.

Every run here makes 13 steps of 17 examples over a set of 155, into the second epoch (fast 10, one epoch): 2, 3 and 5
ranks do not divide the batch, and the last batch of an epoch has 2 examples, fewer than most runs have ranks.

Tolerances. float64 rounds at 1.1e-16. Ranks add sums in another order, and training multiplies the difference: after 30
steps losses of the tutorial net differ by 3e-16 and weights by 3e-15, those of resnet20, which is deeper than resnet8
here, by 3e-14 and 2e-12. A wrong algorithm differs by far more: a mean of means, on 3 ranks, by 3e-4 at the second
step. So the limit is 1e-12 for losses and 1e-11 for weights. float32 rounds at 6e-8, and that also grows: the limit for
losses is 1e-5.

The learning rate in float32 is 0.02, for resnet8 0.01 and for fast 0.02. At the recipes' 0.1 and 0.24 training on so
small a batch is chaotic: a difference of one rounding becomes 1e-4 after 20 steps of float32, or after 30 of resnet20
in float64. If fast's weights move by 6e-8, its loss differs by 5e-3 after 10.

The record was made on one kind of CPU. Images are distorted in float32, which another kind may round otherwise, by 6e-8
of a pixel: the limit is 1e-6.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.options import RESNET8, TUTORIAL
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parent.parent / "golden" / "losses.json"
BATCH, EXAMPLES, STEPS = 17, 155, 13

RESNET = {"model": RESNET8, "sync_batch_norm": True, "learning_rate": 0.01}
# In float64 its convolutions take long. In one epoch all sizes of image take their turn.
# Test-time views would take long to trace.
FAST = {
    "model": "fast",
    "sync_batch_norm": True,
    "learning_rate": 0.02,
    "epochs": 1,
    "max_steps": 10,
    "set": {"test_time_augmentation": False},
}
FLAT = 8  # pixels, the side of the squares of one colour that it trains on: a maximum has equal pixels there
RUNS: dict[str, dict[str, Any]] = {
    "tutorial": {},
    "tutorial, plain": {"set": {"augmentation": "none", "weight_decay": 0, "ema_decay": 0}},
    "tutorial, accumulated and clipped": {"gradient_accumulation": 2, "clip_norm": 1.0},
    "tutorial, float32": {"precision": "float32", "learning_rate": 0.02},
    "fast": FAST,
    "resnet8": RESNET,
    "resnet8, plain, accumulated and clipped": {
        **RESNET,
        "gradient_accumulation": 3,
        "clip_norm": 1.0,
        "set": {"augmentation": "none", "ema_decay": 0.99},
    },
}


# The first half on 2 ranks, the rest on 3: batch norm's statistics, momentum and the order of the data go on.
HALF, RESUMED = "resnet8, first half", "resnet8, resumed"
# By ranks; else all gradients leave in one message. No multiple of a value's size, or as measured.
BUCKETS: dict[int, dict[str, Any]] = {3: {"overlap": "on", "bucket_bytes": 1001}, 5: {"overlap": "on"}}
FIRST_HALF = 11  # in the second epoch

# What each number of ranks runs: everything on 1, and on more a part of it, each net at least; all of it on each would
# take several times as long.
OF_RANKS = {
    1: list(RUNS),
    2: ["tutorial, accumulated and clipped", "tutorial, float32", HALF],
    3: ["fast", "tutorial", "resnet8, plain, accumulated and clipped", RESUMED],
    5: ["tutorial", "tutorial, float32", "resnet8", "resnet8, plain, accumulated and clipped"],
}


def _in_squares(images: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Images [n, height, width, channels], a number of squares high and wide, of one colour in each square."""
    return images[:, ::side, ::side].repeat(side, axis=1).repeat(side, axis=2)


def _train_all(data: str, folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """Several runs in one start of the ranks; the losses of each, and its state in a file."""
    from hvd_cifar import Callback, Dataset
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.data import synthetic
    from hvd_cifar.runtime.world import session
    from hvd_cifar.training.assemble import assemble
    from hvd_cifar.training.callbacks import Checkpointer
    from hvd_cifar.training.trainer import OfUser

    whole = synthetic.LAYOUT.read(synthetic.ensure(Path(data)))

    class Losses(Callback):
        """Every loss."""

        def __init__(self) -> None:
            self.losses: list[float] = []

        def on_log(self, run: Any) -> None:
            self.losses.append(run.loss)

    losses: dict[str, list[float]] = {}
    with session() as world:
        for name, options in runs.items():
            side = FLAT if name == "fast" else 1
            parts = [(_in_squares(p.images[:EXAMPLES], side), p.labels[:EXAMPLES]) for p in (whole.train, whole.test)]
            dataset = Dataset.from_arrays(*parts[0], *parts[1])
            dataset = replace(dataset, channel_mean=whole.channel_mean, channel_deviation=whole.channel_deviation)
            place = "resumed" if name in (HALF, RESUMED) else f"{name}/{world.size}"
            quiet = {"log_every": 1, "eval_every": 0, "summary_every": 0}
            common = {"model": "tutorial", "run_dir": f"{folder}/{place}", **quiet}
            course: dict[str, Any] = {"global_batch_size": BATCH, "max_steps": STEPS, "epochs": 3}
            course["precision"] = "float64"
            rate = {"learning_rate_factor": 1, "warmup_epochs": 0, **options.get("set", {})}
            in_buckets = BUCKETS.get(world.size, {})
            course |= {"check_sync_every": 1000, **in_buckets, **options, "set": rate}
            settings = make(TrainSettings, {**common, **course})
            kept = Losses()
            trainer = assemble(settings, world, OfUser(dataset=dataset, callbacks=[kept]))
            trainer.train()
            losses[name] = kept.losses
            (state,) = (callback.state for callback in trainer.callbacks if isinstance(callback, Checkpointer))
            clocks = {id(v) for v in state.clocks}
            values = [v.numpy() for v in state.variables if id(v) not in clocks]
            if world.is_root:
                np.savez(f"{folder}/{name}-{world.size}", *values)
    return losses


@cache
def _results(n: int, data: Path, folder: Path) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """Losses and state of every run on n ranks."""
    names = OF_RANKS[n]
    runs = {**RUNS, HALF: {**RESNET, "max_steps": FIRST_HALF}, RESUMED: RESNET}
    if RESUMED in names:
        _results(2, data, folder)  # has made the first half
    by_rank = run_ranks(_train_all, n, str(data), str(folder), {name: runs[name] for name in names}, timeout=600)
    assert all(losses == by_rank[0] for losses in by_rank)
    states = {}
    for name in names:
        with np.load(folder / f"{name}-{n}.npz") as file:
            states[name] = [file[key] for key in file.files]
    return by_rank[0], states


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactness")


def _apart(one: list[Any], other: list[Any]) -> float:
    """The largest difference of any variable's value, as a fraction of that variable's largest value."""
    assert [a.shape for a in one] == [b.shape for b in other]
    apart = [np.abs(a - b).max() / max(np.abs(a).max(), 1e-30) for a, b in zip(one, other, strict=True)]
    return float(np.max(apart))  # a NaN stays one


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("n", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_ranks_train_as_one_rank_does(n: int, embedded: Path, folder: Path) -> None:
    alone, states = _results(1, embedded, folder)
    together, theirs = _results(n, embedded, folder)
    parts = {HALF: ("resnet8", 0, FIRST_HALF), RESUMED: ("resnet8", FIRST_HALF, STEPS)}
    for name, found in together.items():
        reference, first, last = parts.get(name, (name, 0, STEPS))
        losses = alone[reference][first:last]
        assert len(losses) == len(set(losses)) == len(found) and np.isfinite(losses).all()
        if name.endswith("float32"):
            assert found == pytest.approx(losses, rel=1e-5), name
            continue
        assert found == pytest.approx(losses, rel=1e-12), name
        if name != HALF:
            assert _apart(states[reference], theirs[name]) < 1e-11, name


def test_one_rank_trains_as_on_record(embedded: Path, folder: Path) -> None:
    """After a change that is meant to change the course of training, write the record anew: GOLDEN_UPDATE=1."""
    alone, _ = _results(1, embedded, folder)
    found = {name: losses for name, losses in alone.items() if not name.endswith("float32")}
    if os.environ.get("GOLDEN_UPDATE"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(GOLDEN.read_text())
    assert recorded.keys() == found.keys()
    for name, losses in recorded.items():
        assert found[name] == pytest.approx(losses, rel=1e-6), name


def test_ranks_train_as_the_towers_of_the_tutorial_do(embedded: Path, tmp_path: Path) -> None:
    """2 ranks against 3 towers, which share nothing but the net and the batches with them."""
    from benchmarks import jobs, runs

    options = [*TUTORIAL, embedded, "--global-batch-size", 30, "--precision", "float64"]
    options += ["--max-steps", STEPS, "--run-dir"]
    ranks, towers = tmp_path / "ranks", tmp_path / "towers"
    quiet = ["--log-every", 1, "--eval-every", 0]
    tower_command = [sys.executable, "-m", "benchmarks.tower", "--towers", 3, *options, towers]
    for words, run_dir in ((jobs.command(2, *options, ranks, *quiet), ranks), (tower_command, towers)):
        run_dir.mkdir()
        jobs.run([str(word) for word in words], run_dir / "log")
    assert len(runs.losses(ranks)) == STEPS
    assert runs.loss_apart(runs.losses(ranks), runs.losses(towers), STEPS) < 1e-12
    averages = [runs.averages(run_dir) for run_dir in (ranks, towers)]
    # TensorFlow's moving average computes its decay in float32.
    assert averages[0] and runs.weights_apart(*averages) < 1e-6
    assert runs.weights_apart(runs.weights(ranks), runs.weights(towers)) < 1e-11
