"""Losses and weights that are not finite, on one rank or on all, with --on-nan skip and rollback."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from tests.faults.jobs import checkpoints
from tests.ranks import CHECKOUT, environment, run_ranks

PROGRAM = Path(__file__).with_name("poisoned.py")
BATCH = 16
OPTIONS = ["--batch-size", BATCH, "--deterministic", "--eval-every", 0, "--eval-examples", 100, "--log-every", 5]


def _train(ranks: int, data: Path, run_dir: Path, plan: dict[str, Any], *options: Any, code: int = 0) -> str:
    """Train the poisoned net; what the job printed."""
    words = [sys.executable, "-m", "hvd_cifar.launch", "-np", ranks, "train", "--model", f"{PROGRAM}:build"]
    words += ["--callbacks", f"{PROGRAM}:{'Undo' if 'undo' in plan else 'Spoil'}", "--dataset", "synthetic"]
    words += ["--data-dir", data, "--run-dir", run_dir, *OPTIONS, *options]
    done = subprocess.run(
        list(map(str, words)),
        capture_output=True,
        text=True,
        timeout=500,
        env=environment({"PLAN": json.dumps(plan)}),
        cwd=CHECKOUT,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def _events(run_dir: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def _ledger(run_dir: Path) -> dict[int, dict[str, Any]]:
    """By step; each step must be there once."""
    lines = [json.loads(line) for line in (run_dir / "examples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line for line in lines}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ["--lookahead", "--ema-decay", 0.9]),
        (2, ["--compression", "powersgd:2", "--gradient-accumulation", 2, "--sync-batch-norm"]),
    ],
)
def test_a_step_that_is_skipped_is_as_if_its_update_were_left_out(
    ranks: int, options: list[Any], embedded: Path, tmp_path: Path
) -> None:
    """NaNs on one rank, at a step of look-ahead and at the one after; the run is stopped between and resumed."""
    options = [*options, "--record-examples", "--checkpoint-every", 13]  # which averages moving statistics
    bad, undone = tmp_path / "bad", tmp_path / "undone"
    said = _train(ranks, embedded, bad, {"nan": [10, 11]}, *options, "--on-nan", "skip", "--max-steps", 13)
    assert said.count("is skipped on all ranks") == 2
    _train(ranks, embedded, bad, {"nan": [17]}, *options, "--on-nan", "skip", "--max-steps", 20)
    _train(ranks, embedded, undone, {"undo": [10, 11, 17]}, *options, "--max-steps", 20)
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


def test_a_rollback_is_as_if_resumed_by_hand_with_the_lower_rate(embedded: Path, tmp_path: Path) -> None:
    """Step 20 leaves weights that are finite and useless: its checkpoint is passed over. The lower rate is resumed."""
    options: list[Any] = ["--checkpoint-every", 5, "--lookahead", "--ema-decay", 0.9, "--record-examples"]
    back = ["--on-nan", "rollback", "--rollback-factor", 0.25]
    bad, by_hand = tmp_path / "bad", tmp_path / "by_hand"
    said = _train(2, embedded, bad, {"huge": 20}, *options, *back, "--max-steps", 25)
    assert "rollback 1 of 3 from step" in said and "to step-15; the learning rate is 0.25 times" in said, said
    assert "model diverged" not in said
    good = bad / "checkpoints" / "step-15"
    _train(2, embedded, by_hand, {}, *options, "--max-steps", 30, "--learning-rate", 0.0125, "--resume", good)
    _train(2, embedded, bad, {}, *options, "--max-steps", 30)
    summary, expected = runs.summary(bad), runs.summary(by_hand)
    for name in ("weights_sha256_by_rank", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == expected[name], name
    assert (summary["rollbacks"], summary["learning_rate_factor"]) == (1, 0.25)
    (event,) = _events(bad, "rollback")
    assert (event["step"], event["learning_rate_factor"]) == (15, 0.25) and event["from_step"] > 20
    trained = _events(bad, "train")
    assert [line["step"] for line in trained] == [5, 10, 15, 20, 25, 30]
    assert trained[3]["learning_rate"] == _events(by_hand, "train")[0]["learning_rate"]
    assert len(_ledger(bad)) == 30
    assert summary["goodput"]["repeated_steps"] > 0


def test_a_run_that_goes_back_too_often_ends(embedded: Path, tmp_path: Path) -> None:
    """The last rank's NaN comes again each time; without a limit the run would never end."""
    run_dir = tmp_path / "run"
    back = ["--on-nan", "rollback", "--max-rollbacks", 2, "--checkpoint-every", 5]
    said = _train(2, embedded, run_dir, {"nan": [4]}, *back, "--max-steps", 30, code=1)
    assert said.count("to step-0; the learning rate is") == 2
    assert said.count("hvd_cifar: loss = nan at step 4: rollback") == 2
    # Once: a launcher that finds this text in the last lines does not start the ranks again.
    assert said.count("model diverged") == said.count("model diverged with loss = nan at step 4; ") == 1
    assert "the run went back 2 times before" in said
    assert checkpoints(run_dir) == [0] and not (run_dir / "summary.json").exists()


def _guarded() -> list[dict[str, Any]]:
    """Steps with a loss scale: an overflow of scaled gradients, a good one, an infinite rate, a NaN in an image."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.data.pipeline import MicroBatch
    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.models import Net
    from hvd_cifar.training.step import StepSpec, make_train_step

    hvd.init()
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2, 2, 3)), keras.layers.Flatten(), keras.layers.Dense(2)])
    plain = DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9), op="sum")
    optimizer = keras.optimizers.LossScaleOptimizer(plain)
    optimizer.build(model.trainable_variables)
    step = make_train_step(Net(model, []), optimizer, StepSpec((2, 2, 3), skips=True))
    seen = []
    for pixel, rate, scale in ((99.0, 0.1, 2.0**127), (1.0, 0.1, 4.0), (1.0, math.inf, 4.0), (math.nan, 0.1, 4.0)):
        optimizer.dynamic_scale.assign(scale)
        before = [v.numpy().tolist() for v in [*model.variables, *plain.variables[2:]]]
        batch = MicroBatch(tf.fill((2, 2, 2, 3), pixel), tf.zeros(2, tf.int32), tf.ones(2), tf.range(2))
        loss = float(step([batch], tf.constant(2), rate, tf.zeros(4))[0])
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
