"""The benchmark for GPUs on a CPU: its small form, its limits, and its prediction."""

from __future__ import annotations

import time
from itertools import pairwise, product
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu import eight, steps, variants
from benchmarks.gpu.__main__ import SECONDS, SECONDS_FOR_STEPS, cases, commands, main
from benchmarks.gpu.serve import Side
from benchmarks.gpu.steps import PRODUCT, ROUNDS, Case, Found
from hvd_cifar import cli


def test_the_small_form_measures_and_a_second_call_only_prints(tmp_path: Path) -> None:
    words = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--torch", str(tmp_path / "none")]
    first = CliRunner().invoke(main, [*words, "--small"])
    assert first.exit_code == 0, first.output
    rows = [line.split("|")[1:-1] for line in first.stdout.splitlines() if line.startswith("| ")]
    found = {name.strip(): cells for name, *cells in rows}
    assert found["hvd_cifar"][1].strip() == "1.000 (1.000 to 1.000)", first.output
    assert all(found[form][-1].strip() == str(ROUNDS) for form in ("hvd_cifar", "all", "one buffer", "input pipeline"))
    assert "kernels, exit code 0" in first.stdout and "| kernel | a step | ms |" in first.stdout
    began = time.monotonic()
    assert CliRunner().invoke(main, [*words, "--small"]).stdout == first.stdout
    assert time.monotonic() - began < 5
    assert "nvidia-smi lists no GPU here" in CliRunner().invoke(main, words).output


def test_all_parts_take_at_most_8_minutes_and_their_commands_have_such_options() -> None:
    found, of_steps = commands(small=False, has_torch=True), cases(small=False)
    assert sum(command.seconds for command in found) + SECONDS_FOR_STEPS <= SECONDS == 480
    assert {(case.model, case.precision, case.examples) for case in of_steps} == {
        *product(("resnet20", "tutorial", "fast"), ("float32", "mixed_bfloat16"), (128, 1024))
    }
    assert all({*case.forms} == {*variants.FORMS, "input pipeline"} for case in of_steps)
    for command in found:
        if ("-m", "hvd_cifar") in pairwise(command.words):
            cli.check([*command.words][command.words.index("hvd_cifar") + 1 :])


def test_what_did_not_fit_is_measured_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forms are pairs of seconds: to build, and of a step."""
    asked: list[str] = []

    class Fake(Side):
        def ask(self, name: str, steps: int, seconds: float) -> dict[str, object]:
            asked.append(name)
            if name == "broken":
                return {"error": "x"}
            time.sleep(1.2 if name == "slow" and asked.count(name) == 1 else 0.01)
            return {"seconds": 0.1, "bytes": 7}

    monkeypatch.setattr(steps, "Side", Fake)
    case = Case("resnet8", "float32", 4, ("slow", "broken", "late"), ())
    steps.measure([case], tmp_path, None, 2.0)  # "slow" is built longer than there is time for builds
    first = case.read(tmp_path)
    assert asked.count("broken") == 0
    assert "late" in case.missing(first, has_torch=False) and len(first.seconds("slow")) == ROUNDS
    asked.clear()
    steps.measure([case], tmp_path, None, 60)
    found = case.read(tmp_path)
    assert case.missing(found, has_torch=False) == [] and "slow" not in asked
    assert (len(found.seconds(PRODUCT)), len(found.seconds("late")), found.errors) == (
        2 * ROUNDS,
        ROUNDS,
        {"broken": "x"},
    )
    assert "| late | 100" in case.table(found) and "| broken | x |" in case.table(found)


def test_a_ring_of_eight_is_predicted_and_says_so(tmp_path: Path) -> None:
    assert eight.ring_seconds(8e9, 8, 12.5, 20.0) == pytest.approx(14 / 8 * 8e9 / 10e9 + 14 * 20e-6)
    Case("resnet20", "float32", 128).write(tmp_path, Found([{"hvd_cifar": 0.004}, {"hvd_cifar": 0.002}]))
    done = CliRunner().invoke(eight.main, ["--measured", str(tmp_path)])
    assert done.exit_code == 0 and done.output.startswith("PREDICTED, not measured: 8 ranks"), done.output
    rows = {line.split("|")[1].strip(): line for line in done.output.splitlines() if line.startswith("| ")}
    assert "| 1,078,896 | 3.0 ms |" in rows["resnet20"] and "| not measured |" in rows["fast"]
    assert "no step of 128 images" in CliRunner().invoke(eight.main, ["--measured", "/proc/none"]).output
