"""Losses and weights that are not finite, on one rank or on all, with --on-nan rollback."""

from __future__ import annotations

import json
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
from tests.ranks import Jobs, command, run_all

PROGRAM = Path(__file__).with_name("poisoned.py")
OPTIONS = ["--batch-size", 16, "--deterministic", "--eval-every", 0, "--log-every", 5, "--checkpoint-every", 5]
OPTIONS += ["--set", "lookahead=true", "--set", "ema_decay=0.9", "--gradient-accumulation", 2, "--record-examples"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of the job of `jobs` are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the trainings below returned in a job, by their names and by rank: it starts once."""

    def train(run: str, plan: dict[str, Any], *options: Any) -> Callable[..., Any]:
        words = ["train", "--model", f"{PROGRAM}:build", "--dataset", "synthetic", "--data-dir", embedded]
        words += ["--callbacks", f"{PROGRAM}:Spoil", "--run-dir", folder / run, *OPTIONS]
        return partial(_poisoned, [*words, *options], plan)

    good = folder / "back" / "checkpoints" / "step-15"
    functions = {
        "back": train("back", {"nan": 8, "huge": 20}, "--max-steps", 25, "--on-nan", "rollback"),
        "by hand": train("by hand", {}, "--max-steps", 30, "--learning-rate", 0.025, "--resume", good),
        "back resumed": train("back", {}, "--max-steps", 30),
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


def test_a_rollback_is_as_if_resumed_by_hand_with_the_lower_rate(jobs: Jobs, folder: Path) -> None:
    """One rank's images have a NaN in step 8. Step 20 leaves weights that are finite and useless: its checkpoint is
    passed over. The lower rate is resumed."""
    bad, by_hand = folder / "back", folder / "by hand"
    said = _said(jobs, "back")
    assert "rollback 1 of 3 from step" in said and "to step-5; the learning rate is 0.5 times" in said, said
    assert "rollback 2 of 3 from step" in said and "to step-15; the learning rate is 0.25 times" in said, said
    assert "model diverged" not in said
    _said(jobs, "by hand")
    _said(jobs, "back resumed")
    summary, expected = runs.summary(bad), runs.summary(by_hand)
    for name in ("weights_sha256_by_rank", "test_loss", "test_accuracy", "train_loss"):
        assert summary[name] == expected[name], name
    assert (summary["rollbacks"], summary["learning_rate_factor"]) == (2, 0.25)
    first, event = _events(bad, "rollback")
    assert (event["step"], event["learning_rate_factor"]) == (15, 0.25) and event["from_step"] > 20
    assert first["step"] == 5
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
