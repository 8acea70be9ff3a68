"""The benchmark for GPUs on a CPU: its small form, its limits, what it packs, and its prediction."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise, product
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu import eight, variants
from benchmarks.gpu.__main__ import FORMS, Command, Options, Steps, main, parts
from benchmarks.gpu.serve import Side
from hvd_cifar import cli
from tests.ranks import CHECKOUT, environment


def test_the_small_form_measures_and_a_second_call_only_prints(tmp_path: Path) -> None:
    words = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--small", "--torch", str(tmp_path)]
    first = CliRunner().invoke(main, [*words[:-1], str(tmp_path / "none")])
    assert first.exit_code == 0, first.output
    rows = [line.split("|")[1:-1] for line in first.stdout.splitlines() if line.startswith("| ")]
    found = {name.strip(): cells for name, *cells in rows}
    assert found["hvd_cifar"][1].strip() == "1.000 (1.000 to 1.000)" and found["hvd_cifar"][-1].strip() == "2"
    assert all(found[form][-1].strip() == "2" for form in ("all", "one buffer")), first.stdout
    assert "kernels-resnet8-hvd_cifar, exit code 0" in first.stdout and "| kernel | a step | ms |" in first.stdout
    began = time.monotonic()
    assert CliRunner().invoke(main, [*words[:-1], str(tmp_path / "none")]).stdout == first.stdout
    assert time.monotonic() - began < 5
    assert "nvidia-smi lists no GPU here" in CliRunner().invoke(main, words[:4]).output


def test_all_parts_take_at_most_8_minutes_and_their_commands_have_such_options(tmp_path: Path) -> None:
    found = parts(Options(tmp_path, tmp_path, tmp_path / "python", small=False))
    assert sum(part.seconds for part in found) <= 480 and len({part.name for part in found}) == len(found)
    steps = [part for part in found if isinstance(part, Steps)]
    assert {(s.model, s.precision, s.examples) for s in steps} == {
        *product(("resnet20", "tutorial", "fast"), ("float32", "mixed_bfloat16"), (128, 1024))
    }
    assert {*FORMS} == {*variants.FORMS} == {*steps[0].forms}
    for part in found:
        words = list(part.words) if isinstance(part, Command) else []
        if ("-m", "hvd_cifar") in pairwise(words):
            cli.check(words[words.index("hvd_cifar") + 1 :])


SERVE = """
import time
from benchmarks.gpu.serve import serve

def make(name):
    if name == "broken":
        raise MemoryError("too little")
    return lambda steps: time.sleep(60 if name == "slow" else 0.01 * steps)

serve(make)
"""


def test_a_side_answers_with_seconds_or_an_error_and_is_ended_at_its_limit(tmp_path: Path) -> None:
    with Side([sys.executable, "-c", SERVE], tmp_path / "log", CHECKOUT, environment()) as side:
        assert side.ask("a b", 2, 60)["seconds"] == pytest.approx(0.01, rel=0.5)
        assert side.ask("broken", 2, 60) == {"name": "broken", "error": "MemoryError: too little"}
        assert side.ask("slow", 2, 0.2) == {} == side.ask("a b", 2, 60)


def test_a_part_ends_at_its_limit_and_is_not_complete(tmp_path: Path) -> None:
    options = Options(tmp_path, tmp_path, None, small=True)
    slow = Command("slow", ("sleep", "60"), 0.2).run(options)
    assert slow["code"] == "no end within 0 s" and not slow["complete"]
    (tmp_path / "found.json").write_text('{"a": 1, "b": 2}')
    told = Command("told", ("{python}", "-c", "print('x')"), 60, "found.json", ("b",))
    assert told.table(told.run(options)) == "told, exit code 0: b 2"


def test_a_ring_of_eight_is_predicted_and_says_so(tmp_path: Path) -> None:
    assert eight.ring_seconds(8e9, 8, 12.5, 20.0) == pytest.approx(14 / 8 * 8e9 / 10e9 + 14 * 20e-6)
    assert eight.ring_seconds(8e9, 1, 12.5, 20.0) == 0.0
    (tmp_path / "steps-resnet20-float32-128.json").write_text(json.dumps({"seconds": {"hvd_cifar": [0.004, 0.002]}}))
    done = CliRunner().invoke(eight.main, ["--measured", str(tmp_path), "--step-ms", "tutorial=2.2"])
    assert done.exit_code == 0 and done.output.startswith("PREDICTED, not measured: 8 ranks"), done.output
    rows = {line.split("|")[1].strip(): line for line in done.output.splitlines() if line.startswith("| ")}
    assert "| 1,078,896 | 3.0 ms |" in rows["resnet20"] and "| 2.2 ms |" in rows["tutorial"]
    assert "| not measured |" in rows["fast"]
    assert "no step of 128 images" in CliRunner().invoke(eight.main, ["--measured", "/proc/none"]).output
