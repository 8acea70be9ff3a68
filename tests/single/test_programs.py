"""The programs behind the tables of docs/: a picture, and wrong input."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import pictures


def test_a_picture_shows_the_ends_of_a_run_and_its_evaluations() -> None:
    def log(step: int) -> str:
        return f"2026-01-01: step {step}, loss = 1.0000 (5.0 images/s; 1.000 s/batch)"

    evaluation = "step 30: cifar10 test accuracy 50.00%"
    said = ["fast on cifar10", *map(log, (10, 20, 30)), evaluation, *map(log, (40, 50, 60)), "step 60: saved /a/runs/c"]
    kept = ["fast on cifar10", log(10), log(20), "...", evaluation, log(50), log(60), "step 60: saved runs/c"]
    assert pictures.shown("\n".join(said), "/a/runs/") == kept
    drawn = pictures.terminal(kept)
    assert drawn.startswith("<svg") and "https://cdn" not in drawn


@pytest.mark.parametrize(
    "words, told",
    [
        (["exactness", "ranks", "--data-dir", "DATA", "--learning-rate", "abc"], "--learning-rate abc"),
        (["exactness", "costs", "--steps", "0"], "--steps"),
        (["accuracy", "--model", "nope", "--data-dir", "DATA", "--runs", "RUNS"], "--model nope"),
        (["exactness", "digests", "--data-dir", "DATA", "--shards", "3"], "--virtual-shards 3"),
        (["accuracy", "--data-dir", "/proc/none", "--runs", "/proc/none"], "--data-dir /proc/none: no CIFAR-10"),
        (["tower", "--towers", "2", "--model", "alexnet", "--run-dir", "/proc/none"], "--model alexnet"),
    ],
)
def test_wrong_input_ends_with_one_line(words: list[str], told: str, real_data: Path, tmp_path: Path) -> None:
    program = import_module(f"benchmarks.{words[0]}").main
    places = {"DATA": str(real_data), "RUNS": str(tmp_path)}
    done = CliRunner().invoke(program, [places.get(word, word) for word in words[1:]])
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]  # a table may have begun on stdout
    assert last.startswith("Error: ") and told in last, done.output
