"""Losses and weights that are not finite, on one rank or on all, with --on-nan skip and rollback."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from benchmarks import runs
from hvd_cifar.errors import Diverged
from hvd_cifar.extensions.bad_numbers import MOST_ROLLBACKS, Rollback
from hvd_cifar.training.state import TrainState
from tests.ranks import Jobs, command, run_all, run_ranks

PROGRAM = Path(__file__).with_name("poisoned.py")
BATCH = 16
OPTIONS = ["--batch-size", BATCH, "--deterministic", "--eval-every", 0, "--log-every", 5]
AVERAGES = ["--set", "lookahead=true", "--set", "ema_decay=0.9", "--gradient-accumulation", 2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of the job of `jobs` are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the trainings below returned in a job, by their names and by rank: it starts once."""

    def train(run: str, plan: dict[str, Any], *options: Any) -> Callable[..., Any]:
        words = ["train", "--model", f"{PROGRAM}:build", "--dataset", "synthetic", "--data-dir", embedded]
        words += ["--callbacks", f"{PROGRAM}:{'Undo' if 'undo' in plan else 'Spoil'}"]
        return partial(_poisoned, [*words, "--run-dir", folder / run, *OPTIONS, *options], plan)

    functions: dict[str, Callable[..., Any]] = {}
    every = [*AVERAGES, "--record-examples", "--checkpoint-every", 13]  # which averages moving statistics
    skip = [*every, "--on-nan", "skip", "--max-steps"]
    functions |= {
        "bad": train("bad", {"nan": [10, 11]}, *skip, 13),
        "bad resumed": train("bad", {"nan": [17]}, *skip, 20),
        "undone": train("undone", {"undo": [10, 11, 17]}, *every, "--max-steps", 20),
    }
    every = ["--checkpoint-every", 5, *AVERAGES, "--record-examples", "--max-steps"]
    good = folder / "back" / "checkpoints" / "step-15"
    back = ["--on-nan", "rollback"]
    functions |= {
        "back": train("back", {"huge": 20}, *every, 25, *back),
        "by hand": train("by hand", {}, *every, 30, "--learning-rate", 0.025, "--resume", good),
        "back resumed": train("back", {}, *every, 30),
    }
    return cache(lambda n: run_all(functions, n, timeout=900, fresh=True))


def _poisoned(words: list[Any], plan: dict[str, Any]) -> dict[str, Any]:
    os.environ["PLAN"] = json.dumps(plan)
    return command(words)


def _said(jobs: Jobs, name: str) -> str:
    """What all ranks of a training printed; each must have ended well."""
    ranks = jobs(2)[name]
    said = "\n".join(line for rank in ranks for line in [*rank["said"], *rank["errors"]])
    assert [rank["code"] for rank in ranks] == [0, 0] and "Traceback" not in said, said
    return said


def _events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in runs.events(run_dir) if line["event"] == event]


def _ledger(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By step; each step must be there once."""
    lines = runs.events(run_dir, "examples.jsonl")
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line for line in lines}


def test_a_step_that_is_skipped_is_as_if_its_update_were_left_out(jobs: Jobs, folder: Path) -> None:
    """NaNs on one rank, at a step of look-ahead and at the one after; the run is stopped between and resumed."""
    bad, undone = folder / "bad", folder / "undone"
    assert _said(jobs, "bad").count("is skipped on all ranks") == 2
    assert _said(jobs, "bad resumed").count("is skipped on all ranks") == 1
    _said(jobs, "undone")
    summary, expected = runs.summary(bad), runs.summary(undone)
    for name in ("weights_sha256_by_rank", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == expected[name], name
    assert (summary["skipped_steps"], expected["skipped_steps"]) == (3, 0)
    assert [line["step"] for line in _events(bad, "skip")] == [10, 11, 17]
    losses = runs.losses(undone)
    assert {step: loss for step, loss in runs.losses(bad).items() if step in (5, 15, 20)} == {
        step: losses[step] for step in (5, 15, 20)
    }
    ledger, of_undone = _ledger(bad), _ledger(undone)
    assert [step for step, line in ledger.items() if line.get("skipped")] == [10, 11, 17]
    assert [line["ranks"] for line in ledger.values()] == [line["ranks"] for line in of_undone.values()]


def test_a_rollback_is_as_if_resumed_by_hand_with_the_lower_rate(jobs: Jobs, folder: Path) -> None:
    """Step 20 leaves weights that are finite and useless: its checkpoint is passed over. The lower rate is resumed."""
    bad, by_hand = folder / "back", folder / "by hand"
    said = _said(jobs, "back")
    assert "rollback 1 of 3 from step" in said and "to step-15; the learning rate is 0.5 times" in said, said
    assert "model diverged" not in said
    _said(jobs, "by hand")
    _said(jobs, "back resumed")
    summary, expected = runs.summary(bad), runs.summary(by_hand)
    for name in ("weights_sha256_by_rank", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == expected[name], name
    assert (summary["rollbacks"], summary["learning_rate_factor"]) == (1, 0.5)
    (event,) = _events(bad, "rollback")
    assert (event["step"], event["learning_rate_factor"]) == (15, 0.5) and event["from_step"] > 20
    trained = _events(bad, "train")
    assert [line["step"] for line in trained] == [5, 10, 15, 20, 25, 30]
    assert trained[3]["learning_rate"] == _events(by_hand, "train")[0]["learning_rate"]
    assert len(_ledger(bad)) == 30
    assert summary["goodput"]["repeated_steps"] > 0


def test_a_run_that_goes_back_too_often_ends() -> None:
    """Without a limit a NaN that comes again each time would never end."""
    run: Any = SimpleNamespace(state=TrainState(keras.Sequential([keras.Input((1,))])), step=4)
    run.state.rollbacks.assign(MOST_ROLLBACKS)
    failure = Diverged("model diverged with loss = nan at step 4")
    assert not Rollback().on_diverged(run, failure)
    assert str(failure).endswith(f"the run went back {MOST_ROLLBACKS} times before")


def _guarded() -> list[dict[str, Any]]:
    """Steps with a loss scale: an overflow of scaled gradients, a good one, an infinite rate, a NaN in an image."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.data.pipeline import MicroBatch
    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.extensions.bad_numbers import Skip
    from hvd_cifar.models import Net
    from hvd_cifar.training.state import TrainState
    from hvd_cifar.training.step import StepSpec, make_train_step

    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    plain = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), op="sum")
    optimizer = keras.optimizers.LossScaleOptimizer(plain)
    optimizer.build(model.trainable_variables)
    run: Any = SimpleNamespace(model=model, optimizer=optimizer, state=TrainState(model, optimizer), observers=[])
    run.observe, skip = run.observers.append, Skip()
    skip.on_build(run)
    step = make_train_step(Net(model, []), optimizer, StepSpec((2, 2, 3)), run.observers)
    seen = []
    for pixel, rate, scale in ((99.0, 0.1, 2.0**127), (1.0, 0.1, 4.0), (1.0, math.inf, 4.0), (math.nan, 0.1, 4.0)):
        optimizer.dynamic_scale.assign(scale)
        before = [v.numpy().tolist() for v in [*model.variables, *plain.variables[2:]]]
        batch = MicroBatch(tf.fill((2, 2, 2, 3), pixel), tf.zeros(2, tf.int32), tf.ones(2), tf.range(2))
        loss = float(step([batch], tf.constant(2), rate, tf.zeros(0))[0])
        after = [v.numpy().tolist() for v in [*model.variables, *plain.variables[2:]]]
        halved = float(optimizer.dynamic_scale.numpy()) < scale
        seen.append({"is_finite": math.isfinite(loss), "is_same": before == after, "halved": halved})
    return seen


def test_a_loss_scale_that_halves_itself_is_no_skipped_step_and_an_update_that_overflows_is_one() -> None:
    (seen,) = run_ranks(_guarded, 1)
    assert seen == [
        {"is_finite": True, "is_same": True, "halved": True},
        {"is_finite": True, "is_same": False, "halved": False},
        {"is_finite": False, "is_same": True, "halved": False},
        {"is_finite": False, "is_same": True, "halved": False},
    ]
