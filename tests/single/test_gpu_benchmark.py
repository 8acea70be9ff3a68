"""The benchmark for GPUs runs on a CPU in its small form, and its prediction prints a table."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.gpu import eight
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.steps import ROUNDS, Case, Found


@pytest.mark.slow
def test_the_small_form_measures_and_a_second_call_only_prints(tmp_path: Path) -> None:
    words = ["--data-dir", str(tmp_path), "--output", str(tmp_path / "out"), "--torch", str(tmp_path / "none")]
    first = CliRunner().invoke(main, [*words, "--small"])
    assert first.exit_code == 0, first.output
    rows = [line.split("|")[1:-1] for line in first.stdout.splitlines() if line.startswith("| ")]
    found = {name.strip(): cells for name, *cells in rows}
    assert found["hvd_cifar"][1].strip() == "1.000 (1.000 to 1.000)", first.output
    assert all(found[form][-1].strip() == str(ROUNDS) for form in ("hvd_cifar", "input pipeline"))
    assert "kernels, exit code 0" in first.stdout and "| kernel | a step | ms |" in first.stdout
    began = time.monotonic()
    assert CliRunner().invoke(main, [*words, "--small"]).stdout == first.stdout
    assert time.monotonic() - began < 5
    assert "nvidia-smi lists no GPU here" in CliRunner().invoke(main, words).output


def test_a_ring_of_eight_is_predicted_and_says_so(tmp_path: Path) -> None:
    Case("resnet20", "float32", 128).write(tmp_path, Found([{"hvd_cifar": 0.004}, {"hvd_cifar": 0.002}]))
    done = CliRunner().invoke(eight.main, ["--measured", str(tmp_path)])
    assert done.exit_code == 0 and done.output.startswith("PREDICTED, not measured: 8 ranks"), done.output
    assert "| 1,078,896 | 3.0 ms |" in done.output and "| not measured |" in done.output
