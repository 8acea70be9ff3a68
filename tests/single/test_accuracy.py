"""The table of accuracies: never of other runs than its header says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.accuracy import check_options, main
from hvd_cifar.errors import UserError


def test_runs_made_with_other_options_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "runs" / "fast-2-0"
    check_options(run_dir, ["--precison", "float32"])  # a slip that `train` refuses: no run was made
    check_options(run_dir, ["--precision", "float32"])
    (run_dir / "config.json").touch()
    check_options(run_dir, ["--precision", "float32"])  # of the same run, to be gone on with or read
    with pytest.raises(UserError, match="fast-2-0 was made with other options: give another --name"):
        check_options(run_dir, [])
    batches = tmp_path / "data" / "cifar-10-batches-bin"
    batches.mkdir(parents=True)
    for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
        (batches / f"{name}.bin").touch()
    words = ["--data-dir", str(tmp_path / "data"), "--runs", str(tmp_path / "runs")]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 2 and "give another --name" in found.output
    found = CliRunner().invoke(main, ["--data-dir", str(tmp_path), *words[2:]])
    assert found.exit_code == 2 and "no CIFAR-10 in its binary layout is there" in found.output
    (tmp_path / "copied").mkdir()
    (tmp_path / "copied" / "config.json").touch()
    with pytest.raises(UserError, match="copied was made with other options"):
        check_options(tmp_path / "copied", [])
