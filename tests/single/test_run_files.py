"""A run's files as programs beside it read them: whole lines, replaced files, damage, and whether the run lives."""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from filelock import FileLock

from hvd_cifar.errors import UserError
from hvd_cifar.reporting import run_files
from hvd_cifar.reporting.run_files import Train, as_events, read_run
from tests.run_dirs import CONFIG, CONFUSION, TRAIN_LINE


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "metrics.jsonl").write_text(TRAIN_LINE)
    (tmp_path / "sessions.jsonl").write_text('{"mark": "launch", "time": 1, "began": 0}\n')
    return tmp_path


def test_events_of_others_are_passed_over_and_damaged_lines_counted() -> None:
    lines = [TRAIN_LINE, '{"event": "other", "step": 1}', "{", '{"step": 1}', TRAIN_LINE.replace("0.25", "NaN"), "5"]
    lines += ['{"event": "ranks", "step": 1, "compute_seconds": [1, 2], "wait_seconds": [1]}', "[" * 3000]
    found, damaged = as_events(lines)
    assert [type(event) for event in found] == [Train] and damaged == 6


def test_a_whole_run_is_read(run_dir: Path) -> None:
    (run_dir / "confusion.json").write_text(json.dumps(CONFUSION))
    run = read_run(run_dir)
    assert (run.config.model, run.config.run.hosts) == ("tutorial", ["a", "b"])
    assert [event.step for event in run.of_kind(Train)] == [10] and run.damaged == 0
    assert run.confusion and run.confusion.matrix[1] == [3, 5] and run.summary is None
    assert [mark["mark"] for mark in run.marks] == ["launch", "lost"]
    assert run.marks[-1]["time"] == pytest.approx(time.time(), abs=60)  # its last sign of life


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key != name}


def _confusion(**changed: Any) -> str:
    return json.dumps({**CONFUSION, **changed})


MISTAKE = CONFUSION["mistakes"][0]
DAMAGED: list[tuple[str, str, str]] = [
    ("config.json", "{", "is damaged"),
    ("config.json", json.dumps(_without("run")), r"is damaged \(run: Field required\)"),
    ("config.json", json.dumps({**CONFIG, "run": {**CONFIG["run"], "hosts": []}}), r"is damaged \(run.hosts"),
    ("summary.json", '{"steps": 5}', r"summary.json is damaged \(test_accuracy: Field required\); train"),
    ("confusion.json", _confusion(matrix=[[1, 2]]), "not all of it is of 2 classes"),
    ("confusion.json", _confusion(matrix=[[1, 2], [-1, 2]]), "greater than or equal to 0"),
    ("confusion.json", _confusion(mistakes=[{**MISTAKE, "label": 2}]), "not all of it is of 2 classes"),
    ("confusion.json", _confusion(mistakes=[{**MISTAKE, "image": "https://example.org/a.png"}]), "mistakes.0.image"),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_told_in_one_line(run_dir: Path, name: str, content: str, message: str) -> None:
    (run_dir / name).write_text(content)
    with pytest.raises(UserError, match=message) as failure:
        read_run(run_dir)
    assert str(run_dir / name) in str(failure.value) and len(str(failure.value).splitlines()) == 1


def test_a_run_lives_while_its_folder_is_locked(run_dir: Path) -> None:
    config = read_run(run_dir).config
    assert run_files.lives(run_dir, config) is None  # nobody ever claimed it
    here = config.model_copy(update={"run": config.run.model_copy(update={"hosts": [socket.gethostname()]})})
    with FileLock(run_dir / ".lock"):
        assert run_files.lives(run_dir, config) is True
        assert run_files.lives(run_dir, here) is True
    assert run_files.lives(run_dir, config) is None  # this host may not see the other's lock
    assert run_files.lives(run_dir, here) is False
    with FileLock(run_dir / ".lock", timeout=0):
        pass  # looking leaves no lock


def test_on_a_disk_without_locks_it_is_not_known_whether_a_run_lives(run_dir: Path, monkeypatch: Any) -> None:
    (run_dir / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    assert run_files.lives(run_dir, read_run(run_dir).config) is None
