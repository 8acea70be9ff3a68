"""--hold-out and --early-stopping: the same examples on any number of ranks, and all ranks end at the same step."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import jobs, runs
from hvd_cifar.data import sampler
from hvd_cifar.errors import RESUME
from tests.options import SMALL
from tests.ranks import CHECKOUT, environment

EXAMPLES, HELD, BATCH = 50_000, 49_840, 32  # what is left makes epochs of 5 steps
# At such a rate no weight changes, so no evaluation is better than the first.
OPTIONS = ["--hold-out", HELD, "--global-batch-size", BATCH, "--virtual-shards", 2, "--learning-rate", 1e-30]
OPTIONS += ["--set", "warmup_epochs=0", "--eval-every", 4, "--log-every", 1, "--record-examples"]


def _train(n: int, data: Path, run_dir: Path, *options: Any, code: int = 0) -> subprocess.CompletedProcess[str]:
    words = jobs.command(n, *SMALL, data, "--run-dir", run_dir, "--epochs", 100, *OPTIONS, *options)
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment(), cwd=CHECKOUT)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_that_no_longer_improves_ends_and_goes_on_with_more_patience(embedded: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = _train(2, embedded, run_dir, "--early-stopping", 2)
    assert "step 12 is the last one: 2 evaluations in a row have no higher validation accuracy than" in first.stdout
    summary = runs.summary(run_dir)
    assert summary["steps"] == 12 and "of step 4 (--early-stopping 2)" in summary["stopped_early"]
    again = _train(1, embedded, run_dir, "--early-stopping", 2)
    assert "step 12 is the last one" in again.stdout and runs.summary(run_dir)["steps"] == 12
    assert runs.summary(run_dir)["weights_sha256"] == summary["weights_sha256"]

    _train(1, embedded, run_dir, "--early-stopping", 4)
    summary = runs.summary(run_dir)
    assert summary["steps"] == 20 and summary["best_evaluation"]["step"] == 4 and summary["evaluations_missing"] == []
    events = _lines(run_dir / "metrics.jsonl")
    by_step = {e["step"]: e["validation_accuracy"] for e in events if e["event"] == "validation"}
    assert list(by_step) == [4, 8, 12, 16, 20] and set(by_step.values()) == {
        summary["best_evaluation"]["validation_accuracy"]
    }
    assert {e["step"] for e in events if e["event"] == "eval"} == {12, 20}  # the test set is for the end
    assert [path.name for path in (run_dir / "best").iterdir()] == ["step-4"]
    assert not (run_dir / "snapshots").exists()

    left = sampler.held_out(0, EXAMPLES, HELD)[0].tolist()
    record = _lines(run_dir / "examples.jsonl")
    assert [entry["step"] for entry in record] == list(range(1, 21)) and {len(e["ranks"]) for e in record} == {1, 2}
    for epoch in range(4):
        used = [i for entry in record[5 * epoch : 5 * epoch + 5] for of_rank in entry["ranks"] for i in of_rank]
        assert sorted(used) == left, epoch

    output = tmp_path / "best.json"
    words = jobs.command(
        1, "--run-dir", run_dir, "--checkpoint", run_dir / "best", "--output", output
    )
    words[words.index("train")] = "evaluate"
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment(), cwd=CHECKOUT)
    assert done.returncode == 0 and json.loads(output.read_text())["step"] == 4, done.stderr


STOPS = """
import os, signal, time
import hvd_cifar

class Stops(hvd_cifar.Callback):
    \"\"\"Asks the run to stop within step 10, after which an evaluation is due.\"\"\"

    def on_start(self, run):
        self.started_at = run.step

    def on_step(self, run):
        if run.step == 9 and self.started_at == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(100):  # another thread notes it, also where the machine stalls
                time.sleep(0.01)

    def on_evaluation(self, run, evaluation):
        print("told of step", evaluation.step, "by a run that started at", self.started_at, flush=True)
"""


def test_an_evaluation_that_was_put_off_is_made_and_the_best_weights_stay(embedded: Path, tmp_path: Path) -> None:
    """No evaluation is better than the first, of step 5."""
    run_dir, sessions = tmp_path / "run", tmp_path / "run" / "sessions.jsonl"
    (tmp_path / "stops.py").write_text(STOPS)
    options = ["--eval-every", 5, "--log-every", 50, "--max-steps", 15, "--callbacks", tmp_path / "stops.py:Stops"]
    done = _train(1, embedded, run_dir, *options, code=RESUME)
    assert "told of step 5 " in done.stdout and "told of step 10 " not in done.stdout, done.stdout
    assert [path.name for path in (run_dir / "best").iterdir()] == ["step-5"]

    marks, board = sessions.read_bytes(), run_dir / "tensorboard"
    board.rename(tmp_path / "board")
    board.touch()
    done = _train(2, embedded, run_dir, *options, code=2)
    assert done.stderr.count(str(board)) == 1 and sessions.read_bytes() == marks  # the time until now does not count
    board.unlink()
    (tmp_path / "board").rename(board)

    done = _train(1, embedded, run_dir, *options)
    assert "told of step 10 by a run that started at 10" in done.stdout, done.stdout
    assert [path.name for path in (run_dir / "best").iterdir()] == ["step-5"]
    assert runs.summary(run_dir)["best_evaluation"]["step"] == 5
