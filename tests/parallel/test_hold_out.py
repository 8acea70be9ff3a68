"""--hold-out and --early-stopping: the same examples on any number of ranks, and all ranks end at the same step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import runs
from hvd_cifar.data import sampler
from tests.options import FEW, SMALL_NET
from tests.ranks import run_command
from tests.run_dirs import examples, used
from tests.small import EXAMPLES

HELD, BATCH = EXAMPLES - 160, 32  # what is left makes epochs of 5 steps
# At such a rate no weight changes, so no evaluation is better than the first.
OPTIONS = ["--hold-out", HELD, "--global-batch-size", BATCH, "--virtual-shards", 2, "--learning-rate", 1e-30]
OPTIONS += ["--set", "warmup_epochs=0", "--eval-every", 4, "--log-every", 1, "--record-examples", "--epochs", 100]


def _command(n: int, *words: Any) -> str:
    """What rank 0 of `n` ranks says."""
    return "\n".join(run_command(n, *words, deterministic=True)[0]["said"])  # as --virtual-shards computes


def test_a_run_that_no_longer_improves_ends_and_goes_on_with_more_patience(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    train = ["train", "--model", SMALL_NET, "--dataset", FEW, "--run-dir", run_dir, *OPTIONS, "--early-stopping"]
    said = _command(2, *train, 2)
    assert "step 12 is the last one: 2 evaluations in a row have no higher validation accuracy than" in said
    summary = runs.summary(run_dir)
    assert summary["steps"] == 12 and "of step 4 (--early-stopping 2)" in summary["stopped_early"]

    _command(1, *train, 4)
    summary = runs.summary(run_dir)
    assert summary["steps"] == 20 and summary["best_evaluation"]["step"] == 4 and summary["evaluations_missing"] == []
    events = runs.events(run_dir)
    by_step = {e["step"]: e["validation_accuracy"] for e in events if e["event"] == "validation"}
    assert list(by_step) == [4, 8, 12, 16, 20]
    assert set(by_step.values()) == {summary["best_evaluation"]["validation_accuracy"]}
    assert {e["step"] for e in events if e["event"] == "eval"} == {12, 20}  # the test set is for the end
    assert (run_dir / "best").resolve().name == "step-4"

    left = sampler.held_out(0, EXAMPLES, HELD)[0].tolist()
    record = examples(run_dir)
    assert len(record) == 20
    assert all(used(record, 5 * epoch + 1, 5 * epoch + 5) == left for epoch in range(4))

    output = tmp_path / "best.json"
    _command(1, "evaluate", "--run-dir", run_dir, "--checkpoint", run_dir / "best", "--output", output)
    assert json.loads(output.read_text())["step"] == 4
