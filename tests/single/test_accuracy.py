"""The table of accuracies: never of other runs than its header says."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from benchmarks.accuracy import check_options, main


def test_runs_made_with_other_options_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "fast-2-0"
    check_options(run_dir, ["--precision", "float32"])
    check_options(run_dir, ["--precision", "float32"])  # of the same run, to be gone on with or read
    with pytest.raises(click.UsageError, match="fast-2-0 was made with other options: give another --name"):
        check_options(run_dir, [])
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path), "--runs", str(tmp_path)])
    assert found.exit_code == 2 and "give another --name" in found.output
    (tmp_path / "copied").mkdir()
    with pytest.raises(click.UsageError, match="copied was made with other options"):
        check_options(tmp_path / "copied", [])


def test_whole_runs_want_real_data(tmp_path: Path) -> None:
    from benchmarks.peers.whole import main as whole

    found = CliRunner().invoke(whole, ["--data-dir", str(tmp_path), "--environment", str(tmp_path / "none")])
    assert found.exit_code == 2 and "no CIFAR-10 in its binary layout is there" in found.output
    assert not (tmp_path / "none").exists()
