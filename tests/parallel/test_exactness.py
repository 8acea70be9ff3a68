"""The same training at any number of ranks: losses and weights against one rank's, and losses against those on record.

Every run makes 6 steps of 17 examples over a set of 53, into the second epoch: 2, 3 and 5 ranks do not divide the
batch, and the last batch of an epoch has 2 examples, fewer than most runs have ranks.

Tolerances. float64 rounds at 1.1e-16. Ranks add sums in another order, and training multiplies the difference: after 30
steps losses of the tutorial net differ by 3e-16 and weights by 3e-15, those of resnet20 by 3e-14 and 2e-12. A wrong
algorithm differs by far more: a mean of means, on 3 ranks, by 3e-4 at the second step. In float32, which rounds at
6e-8, the limit for losses is 1e-5. Learning rates are lower than the recipes', at which training on so small a batch is
chaotic. The record was made on one kind of CPU; another may round the distortion of images otherwise, by 6e-8.
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

from tests.options import RESNET8, TUTORIAL
from tests.ranks import run_ranks

GOLDEN = Path(__file__).parent.parent / "golden" / "losses.json"
BATCH, EXAMPLES, STEPS = 17, 53, 6
TOWER_STEPS = 13

RESNET = {"model": RESNET8, "sync_batch_norm": True, "learning_rate": 0.01}
FIRST_HALF = 5  # in the second epoch
# The first half on 2 ranks, the rest on 3: batch norm's statistics, momentum and the order of the data go on.
HALF, RESUMED = "resnet8, first half", "resnet8, resumed"
RUNS: dict[str, dict[str, Any]] = {
    "tutorial": {},
    "tutorial, accumulated and clipped": {"gradient_accumulation": 2, "clip_norm": 1.0},
    "tutorial, float32": {"precision": "float32", "learning_rate": 0.02},
    "resnet8": RESNET,
    "resnet8, plain, accumulated and clipped": {
        **RESNET,
        "gradient_accumulation": 3,
        "clip_norm": 1.0,
        "set": {"ema_decay": 0.99},
    },
    HALF: {**RESNET, "max_steps": FIRST_HALF},
    RESUMED: RESNET,
}
ON_RECORD = ["tutorial", "tutorial, accumulated and clipped", "resnet8"]
# By ranks; else all gradients leave in one message. No multiple of a value's size, or a sixteenth.
BUCKETS: dict[int, dict[str, Any]] = {3: {"overlap": "on", "bucket_bytes": 1001}, 5: {"overlap": "on"}}

# What each number of ranks runs, in all runs of the tests and in slow ones: all of it on each would take several times
# as long.
FIRST = [(2, "tutorial, accumulated and clipped"), (2, HALF), (3, "tutorial"), (3, RESUMED)]
SLOW = [(2, "tutorial, float32"), (3, "resnet8, plain, accumulated and clipped"), (5, "tutorial")]


def _train(data: str, folder: str, name: str, run_dir: str, options: dict[str, Any]) -> list[float]:
    """The losses of a run, whose state goes into a file."""
    import hvd_cifar
    from hvd_cifar.data import synthetic

    losses: list[float] = []

    class Record(hvd_cifar.Callback):
        def on_log(self, run: Any) -> None:
            losses.append(run.loss)

        def on_end(self, run: Any) -> None:
            values = [v.numpy() for v in run.state.replicated(with_own=True)]
            if run.world.is_root:
                np.savez(f"{folder}/{name}-{run.world.size}", *values)

    whole = synthetic.LAYOUT.read(Path(data) / synthetic.LAYOUT.folder)
    parts = [(part.images[:EXAMPLES], part.labels[:EXAMPLES]) for part in (whole.train, whole.test)]
    dataset = hvd_cifar.Dataset.from_arrays(*parts[0], *parts[1])
    dataset = replace(dataset, channel_mean=whole.channel_mean, channel_deviation=whole.channel_deviation)
    common = {"model": "tutorial", "run_dir": run_dir, "log_every": 1, "eval_every": 0}
    common |= {"check_sync_every": 1000}
    course = {"global_batch_size": BATCH, "max_steps": STEPS, "epochs": 3, "precision": "float64"}
    recipe = {"learning_rate_factor": 1, "warmup_epochs": 0, **options.get("set", {})}
    hvd_cifar.train(dataset=dataset, callbacks=[Record()], **{**common, **course, **options, "set": recipe})
    return losses


@cache
def _results(name: str, n: int, data: Path, folder: Path) -> tuple[list[float], list[Any]]:
    """Losses and state of a run on n ranks."""
    if name == RESUMED:
        _results(HALF, 2, data, folder)
    run_dir = str(folder / ("resumed" if name in (HALF, RESUMED) else f"{name}/{n}"))
    options = {**BUCKETS.get(n, {}), **RUNS[name]}
    by_rank = run_ranks(_train, n, str(data), str(folder), name, run_dir, options, timeout=300)
    assert all(losses == by_rank[0] for losses in by_rank)
    with np.load(folder / f"{name}-{n}.npz") as file:
        return by_rank[0], [file[key] for key in file.files]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exactness")


def _apart(one: list[Any], other: list[Any]) -> float:
    """The largest difference of any variable's value, as a fraction of that variable's largest value."""
    assert [a.shape for a in one] == [b.shape for b in other]
    apart = [np.abs(a - b).max() / max(np.abs(a).max(), 1e-30) for a, b in zip(one, other, strict=True)]
    return float(np.max(apart))  # a NaN stays one


@pytest.mark.parametrize(("n", "name"), FIRST + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW])
def test_ranks_train_as_one_rank_does(n: int, name: str, embedded: Path, folder: Path) -> None:
    parts = {HALF: ("resnet8", 0, FIRST_HALF), RESUMED: ("resnet8", FIRST_HALF, STEPS)}
    reference, first, last = parts.get(name, (name, 0, STEPS))
    alone, state = _results(reference, 1, embedded, folder)
    found, their_state = _results(name, n, embedded, folder)
    losses = alone[first:last]
    assert len(losses) == len(set(losses)) == len(found) and np.isfinite(losses).all()
    if name.endswith("float32"):
        assert found == pytest.approx(losses, rel=1e-5)
        return
    assert found == pytest.approx(losses, rel=1e-12)
    if name != HALF:
        assert _apart(state, their_state) < 1e-11


@pytest.mark.parametrize("name", ON_RECORD)
def test_one_rank_trains_as_on_record(name: str, embedded: Path, folder: Path) -> None:
    """After a change that is meant to change the course of training, write the record anew: GOLDEN_UPDATE=1."""
    found, _ = _results(name, 1, embedded, folder)
    recorded = json.loads(GOLDEN.read_text())
    if os.environ.get("GOLDEN_UPDATE"):
        recorded[name] = found
        GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n")
    assert set(recorded) == set(ON_RECORD)
    assert found == pytest.approx(recorded[name], rel=1e-6)


@pytest.mark.slow
def test_ranks_train_as_the_towers_of_the_tutorial_do(embedded: Path, tmp_path: Path) -> None:
    """2 ranks against 3 towers, which share nothing but the net and the batches with them."""
    from benchmarks import jobs, runs

    options = [*TUTORIAL, embedded, "--global-batch-size", 30, "--precision", "float64"]
    options += ["--max-steps", TOWER_STEPS, "--run-dir"]
    ranks, towers = tmp_path / "ranks", tmp_path / "towers"
    quiet = ["--log-every", 1, "--eval-every", 0]
    tower_command = [sys.executable, "-m", "benchmarks.tower", "--towers", 3, *options, towers]
    for words, run_dir in ((jobs.command(2, *options, ranks, *quiet), ranks), (tower_command, towers)):
        run_dir.mkdir()
        jobs.run([str(word) for word in words], run_dir / "log")
    assert len(runs.losses(ranks)) == TOWER_STEPS
    assert runs.loss_apart(runs.losses(ranks), runs.losses(towers), TOWER_STEPS) < 1e-12
    averages = [runs.weights(run_dir, "averages") for run_dir in (ranks, towers)]
    # TensorFlow's moving average computes its decay in float32.
    assert averages[0] and runs.weights_apart(*averages) < 1e-6
    assert runs.weights_apart(runs.weights(ranks), runs.weights(towers)) < 1e-11
