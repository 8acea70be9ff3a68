"""A loss that is not finite, on one rank: all ranks end, and a new run goes on from a checkpoint at a lower rate."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from tests.options import FEW
from tests.ranks import command, run_all

PROGRAM = Path(__file__).with_name("poisoned.py")
OPTIONS = ["--dataset", FEW, "--batch-size", 16, "--max-steps", 12, "--log-every", 3, "--checkpoint-every", 3]


def _train(nan_step: int, words: list[Any]) -> dict[str, Any]:
    os.environ["NAN_STEP"] = str(nan_step)
    return command(["train", "--model", f"{PROGRAM}:build", "--callbacks", f"{PROGRAM}:Spoil", *words, *OPTIONS])


def _rate(run_dir: Path, step: int) -> float:
    (line,) = (e for e in runs.events(run_dir) if e["event"] == "train" and e["step"] == step)
    return float(line["learning_rate"])


def test_a_nan_on_one_rank_ends_all_and_its_checkpoint_goes_on_with_a_lower_rate(tmp_path: Path) -> None:
    bad, lower, clipped = (tmp_path / name for name in ("bad", "lower", "clipped"))
    go_on = ["--resume", bad / "checkpoints" / "step-3", "--run-dir"]
    functions = {
        "bad": partial(_train, 8, ["--run-dir", bad, "--learning-rate", 0.1]),
        "lower": partial(_train, 0, [*go_on, lower, "--learning-rate", 0.01]),
        "clipped": partial(_train, 0, [*go_on, clipped, "--clip-norm", 1]),
    }
    found = run_all(functions, 2, timeout=300)
    codes = {name: [rank["code"] for rank in ranks] for name, ranks in found.items()}
    assert codes == {"bad": [1, 1], "lower": [0, 0], "clipped": [0, 0]}, found
    (line,) = (line for rank in found["bad"] for line in rank["errors"] if "diverged" in line)
    told = "model diverged with loss = nan at step 8; the checkpoint of step 6 is kept; "
    assert line.endswith(f"{told}lower --learning-rate or give --clip-norm")
    assert not (bad / "summary.json").exists()
    for run_dir in (lower, clipped):
        assert runs.steps(run_dir) == [6, 9, 12] and runs.summary(run_dir)["replicas_identical"]
    assert _rate(lower, 6) == pytest.approx(_rate(bad, 6) / 10)
