"""The programs behind the tables of docs/: their arithmetic, wrong input, and (slow) that they run."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner

from benchmarks import input_cost, layers, operations, pictures
from benchmarks.operations import Row
from tests.ranks import CHECKOUT, environment


def test_small_kinds_of_operation_stand_together_and_all_add_up_to_the_step() -> None:
    rows = [Row("Conv2D", 60.0, 9), Row("MatMul", 20.0, 99), Row("Relu", 0.4, 3), Row("Sum", 0.2, 2)]
    lines = operations.table(rows, 100.0, 0.005).splitlines()[2:]
    assert lines == [
        "| Conv2D | 60.0 | 60.0% | 9 |",
        "| MatMul | 20.0 | 20.0% | 99 |",
        "| 2 other kinds | 0.6 | 0.6% | 5 |",
        "| between operations, in XLA, and Python | 19.4 | 19.4% | |",
        "| the step | 100.0 | 100.0% | |",
    ]


def test_pairs_are_means_over_ranks_without_the_first_which_warms_up() -> None:
    one = {"step": [9.0, 1.0, 1.0], "fed": [9.0, 1.1, 1.0]}
    other = {"step": [9.0, 1.0, 3.0], "fed": [9.0, 1.1, 3.5]}
    pairs = input_cost.pairs_of([one, other])
    assert len(pairs) == 2
    assert [*pairs[0], *pairs[1]] == pytest.approx([1.0, 1.1, 2.0, 2.25])
    assert input_cost.cost([(1.0, 1.02), (1.0, 1.04)]) == "3.0 ± 1.0% | 3.0%"


def test_a_picture_shows_the_ends_of_a_run_and_its_evaluations() -> None:
    def log(step: int) -> str:
        return f"2026-01-01: step {step}, loss = 1.0000 (5.0 images/s; 1.000 s/batch)"

    evaluation = "step 30: cifar10 test accuracy 50.00%"
    said = ["fast on cifar10", *map(log, (10, 20, 30)), evaluation, *map(log, (40, 50, 60)), "step 60: saved /a/runs/c"]
    kept = ["fast on cifar10", log(10), log(20), "...", evaluation, log(50), log(60), "step 60: saved runs/c"]
    assert pictures.shown("\n".join(said), "/a/runs/") == kept
    drawn = pictures.terminal(kept)
    assert drawn.startswith("<svg") and "https://cdn" not in drawn


def test_layers_are_compared_pair_by_pair() -> None:
    case = layers.Case("maximum", (8, 4, 4, 2), abs, abs)
    told = layers.row(case, [0.001, 0.002, 0.004], [0.002, 0.002, 0.002])
    assert told == "| maximum | 8 x 4 x 4 x 2 | 2.0 | 2.0 | 1.00 (0.50 to 2.00) |"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", range(len(layers.cases("float32"))))
def test_both_ways_of_a_layer_come_to_the_same(number: int, precision: str) -> None:
    case = layers.cases(precision)[number]
    draw = np.random.default_rng(14)
    images = tf.constant(draw.normal(0, 10, size=(2, *case.shape[1:])), precision)
    upstream = tf.constant(draw.normal(size=case.own(images).shape), precision)
    found = []
    for way in (case.plain, case.own):
        with tf.GradientTape() as tape:
            tape.watch(images)
            result = way(images)
        found.append((result, tape.gradient(result, images, upstream)))
    near = (0.021, 0.2) if case.name.startswith("GELU") else (1e-3, 1e-3)  # another function, within this bound
    rounding = {"float32": 0.0, "bfloat16": 2**-6}[precision]
    # Convolutions by sums of bfloat16's products round operands: errors deviate by 1.2% of a result's typical size.
    coarse = precision == "bfloat16" and case.name.endswith("compiled")
    for plain, own, most in zip(*found, near, strict=True):
        plain, own = (tf.cast(value, tf.float64).numpy() for value in (plain, own))
        if coarse:
            typical = np.sqrt((plain**2).mean())
            assert np.sqrt(((own - plain) ** 2).mean()) < 0.016 * typical
            most = 0.12 * typical
        np.testing.assert_allclose(own, plain, rtol=rounding, atol=most + rounding)


@pytest.mark.parametrize(
    "words, told",
    [
        (["input_cost", "--model", "alexnet", "--data-dir", "DATA"], "--model alexnet"),
        (["input_cost", "--precision", "int8", "--data-dir", "DATA"], "--precision int8"),
        (["exactness", "ranks", "--data-dir", "DATA", "--learning-rate", "abc"], "--learning-rate abc"),
        (["exactness", "costs", "--steps", "0"], "--steps"),
        (["memory", "--data-dir", "/none"], "--data-dir /none: no CIFAR-10"),
        (["fixed_order", "--repeats", "1"], "--repeats"),
        (["layers", "--only", "attention"], "no row's name holds 'attention'"),
        (["fixed_order", "--model", "alexnet"], "--model"),
        (["resume", "--steps", "4"], "--steps"),
        (["accuracy", "--model", "nope", "--data-dir", "DATA", "--runs", "RUNS"], "--model nope"),
        (["exactness", "digests", "--data-dir", "DATA", "--shards", "3"], "--virtual-shards 3"),
        (["accuracy", "--data-dir", "/none", "--runs", "/none"], "--data-dir /none: no CIFAR-10"),
        (["peers.whole", "--data-dir", "DATA", "--output", "/"], "cannot write /: is a folder"),
        (["peers.whole", "--data-dir", "DATA", "--environment", sys.prefix], "is this project's own"),
        (["tower", "--towers", "2", "--model", "alexnet", "--run-dir", "/none"], "--model alexnet"),
    ],
)
def test_wrong_input_ends_with_one_line(words: list[str], told: str, real_data: Path, tmp_path: Path) -> None:
    program = import_module(f"benchmarks.{words[0]}").main
    places = {"DATA": str(real_data), "RUNS": str(tmp_path)}
    done = CliRunner().invoke(program, [places.get(word, word) for word in words[1:]])
    assert done.exit_code == 2, done.output
    last = done.stderr.splitlines()[-1]  # a table may have begun on stdout
    assert last.startswith("Error: ") and told in last, done.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "words, shown",
    [
        (
            ["operations", "--steps", "2"],
            ["Conv2DBackpropFilter", "| the step |", "tutorial, float32, 8 images"],
        ),
        (["input_cost", "--steps", "1", "--pairs", "2"], ["| `tutorial`, 8 a rank |", "2 ranks, float32, 1 steps"]),
    ],
)
def test_they_run(words: list[str], shown: list[str], real_data: Path) -> None:
    program = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    program += ["--data-dir", str(real_data), "--model", "tutorial", "--batch-size", "8"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=250, env=environment(), cwd=CHECKOUT)
    assert done.returncode == 0, done.stderr
    assert all(part in done.stdout for part in shown), done.stdout
