"""A run's files as programs beside it read them: whole lines, damage, and whether the run lives."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.reporting.run_files import Train, as_events, read_run
from tests.run_dirs import CONFIG, CONFUSION, MARKS, TRAIN_LINE, write_run


def test_events_of_others_are_passed_over_and_damaged_lines_counted() -> None:
    lines = [TRAIN_LINE, '{"event": "other", "step": 1}', "{", '{"step": 1}', TRAIN_LINE.replace("0.25", "NaN"), "5"]
    lines += ['{"event": "ranks", "step": 1, "compute_seconds": [1, 2], "wait_seconds": [1]}', "[" * 3000]
    found, damaged = as_events(lines)
    assert [type(event) for event in found] == [Train] and damaged == 6


def test_a_run_without_an_end_lives_while_it_gives_signs_of_life(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "run", marks=MARKS[:1])
    run = read_run(run_dir)
    assert (run.config.model, run.config.run.hosts, run.damaged) == ("tutorial", ["a", "b"], 0)
    assert run.confusion and run.confusion.matrix[1] == [3, 5] and run.summary is None
    assert run.marks[-1]["time"] == pytest.approx(time.time(), abs=60)
    for age, word in ((500, "running"), (700, "cut off")):
        for path in run_dir.iterdir():
            os.utime(path, (time.time() - age,) * 2)
        assert read_run(run_dir).standing[0] == word


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key != name}


def _confusion(**changed: Any) -> str:
    return json.dumps({**CONFUSION, **changed})


MISTAKE = CONFUSION["mistakes"][0]
DAMAGED: list[tuple[str, str, str]] = [
    ("config.json", "{", "is damaged"),
    ("config.json", json.dumps(_without("run")), r"is damaged \(run: Field required\)"),
    ("summary.json", '{"steps": 5}', r"summary.json is damaged \(test_accuracy: Field required\); train"),
    ("confusion.json", _confusion(matrix=[[1, 2]]), "not all of it is of 2 classes"),
    ("confusion.json", _confusion(mistakes=[{**MISTAKE, "label": 2}]), "not all of it is of 2 classes"),
    ("confusion.json", _confusion(mistakes=[{**MISTAKE, "image": "https://example.org/a.png"}]), "mistakes.0.image"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, name: str, content: str, message: str) -> None:
    run_dir = write_run(tmp_path / "run")
    (run_dir / name).write_text(content)
    with pytest.raises(UserError, match=message) as failure:
        read_run(run_dir)
    assert str(run_dir / name) in str(failure.value) and len(str(failure.value).splitlines()) == 1
