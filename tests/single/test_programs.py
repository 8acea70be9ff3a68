"""The programs behind the tables of docs/: wrong input."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner


@pytest.mark.parametrize(
    "words, told",
    [
        (["exactness", "--data-dir", "DATA", "--learning-rate", "abc"], "--learning-rate abc"),
        (["exactness", "--steps", "0"], "--steps"),
        (["accuracy", "--model", "nope", "--data-dir", "DATA", "--runs", "RUNS"], "--model nope"),
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
