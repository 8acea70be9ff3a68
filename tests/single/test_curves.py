"""Curves of whole runs: read from run directories and from the PyTorch side's file."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from benchmarks.curves import accuracies, main


def test_curves_of_a_run_and_of_a_file(tmp_path: Path) -> None:
    found = [{"event": "eval", "step": step, "epoch": step / 4, "test_accuracy": step / 20} for step in (5, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in found))
    (file := tmp_path / "torch.json").write_text(json.dumps({"test_accuracy": {"4": 0.5}, "seconds": 1.0}))
    assert accuracies(tmp_path) == {5: 0.25, 10: 0.5} and accuracies(file) == {4: 0.5}
    picture = tmp_path / "curves.svg"
    done = CliRunner().invoke(main, [f"ours={tmp_path}", f"theirs={file}", "--output", str(picture)])
    assert done.exit_code == 0, done.output
    assert picture.read_text().count("50.00%") == 2  # the last of each, as a comment beside its glyphs
    for words, told in (
        ((f"theirs={file}", "--by", "epoch"), "has no epochs"),
        ((f"ours={tmp_path / 'none'}",), "no file of benchmarks.peers.published: "),
        (("ours",), "give NAME=RUN_DIR or NAME=FILE.json"),
    ):
        failed = CliRunner().invoke(main, [*words, "--output", str(picture)])
        assert failed.exit_code == 2 and told in failed.output
