"""What the launcher tells before any rank starts: one line, exit code 2, nothing left behind, no TensorFlow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar import config, fields, use_settings
from hvd_cifar.data.cifar import CIFAR10
from hvd_cifar.errors import UserError
from hvd_cifar.launch import preflight
from hvd_cifar.runtime import devices

EVALUATE, TRAIN = use_settings.EvaluateSettings, config.TrainSettings


def _check(kind: type[fields.S], ranks: int = 2, sees_files: bool = True, **values: Any) -> list[str]:
    warnings: list[str] = []
    settings = config.make(kind, values)
    preflight.check(settings, ranks, sees_files=sees_files, on_gpus=False, warn=warnings.append)
    return warnings


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").touch()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run_dir": "{file}/x"}, "--run-dir .*/file is not a folder"),
        ({"data_dir": "{file}"}, "--data-dir .*/file is not a folder"),
        ({"data_dir": "{none}" + 300 * "x"}, "cannot read .*/nonexx.*: File name too long: allow reading there, or"),
        ({"data_dir": "{damaged}"}, "data_batch_1.bin has 3 bytes instead of 30,730,000"),
        ({"dataset": "folder:{none}"}, "--dataset folder:.*/none: there is no such folder"),
        ({"dataset": "{none}.py:f"}, "--dataset .*none.py:f: there is no such file"),
        ({"model": "{none}.py:f"}, "--model .*none.py:f: there is no such file"),
        ({"callbacks": "{none}.py:f"}, "--callbacks .*none.py:f: there is no such file"),
        ({"resume": "{none}"}, "--resume .*/none: no checkpoint is there"),
        (
            {"batch_size": 30_000},
            "global batch of 60000 is larger than the training set of 50000: give a smaller --batch-size",
        ),
        ({"global_batch_size": 50_001, "dataset": "cifar100"}, "global batch of 50001 is larger"),
        ({"global_batch_size": 1}, "global batch of 1 is smaller than 2 ranks"),
        ({"virtual_shards": 1}, "2 ranks do not divide them; start 1 ranks"),
    ],
)
def test_a_run_that_cannot_begin(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "data_batch_1.bin").write_text("abc")
    before = sorted(tmp_path.rglob("*"))
    places = {name: tmp_path / name for name in ("file", "none", "damaged")}
    given = {name: v.format(**places) if isinstance(v, str) else v for name, v in values.items()}
    common: dict[str, Any] = {"dataset": "synthetic" if "data_dir" not in values else "cifar10"}
    with pytest.raises(UserError, match=message):
        _check(TRAIN, **(common | {"data_dir": tmp_path / "data", "run_dir": tmp_path / "new"} | given))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run_dir": "/proc/no/such"}, "/proc/no/such: there is no run"),
        ({"checkpoint": "/proc/no/such"}, "--checkpoint /proc/no/such: no checkpoint is there"),
        ({"output": "/proc/no/such/x.json"}, "--output .*: there is no folder /proc/no/such"),
        ({"output": "/tmp"}, "--output /tmp: is a folder"),
        ({"output": "/dev/stdout"}, "--output /dev/stdout: it is no regular file"),
    ],
)
def test_an_evaluation_that_cannot_begin(values: dict[str, Any], message: str, run: Path) -> None:
    with pytest.raises(UserError, match=message):
        _check(EVALUATE, **{"run_dir": run, **values})


def test_what_can_begin_passes_and_other_hosts_folders_are_not_looked_at(run: Path, tmp_path: Path) -> None:
    for name in CIFAR10.files:
        with (tmp_path / name).open("wb") as file:
            file.truncate(CIFAR10.bytes_of(name))
    assert _check(EVALUATE, run_dir=run, output=run / "new.json") == []
    assert _check(TRAIN, data_dir=tmp_path, run_dir=tmp_path / "a" / "b", virtual_shards=4) == []
    assert _check(TRAIN, sees_files=False, data_dir="/proc/none", run_dir="/dev/null/x", resume="/proc/no/such") == []
    (warning,) = _check(TRAIN, data_dir=tmp_path, run_dir=run, precision="mixed_float16")
    assert "mixed_float16 is slow on a CPU" in warning


def test_a_folder_that_this_user_cannot_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(UserError, match=f"--run-dir x: {tmp_path} cannot be written"):
        preflight.check_folder(tmp_path / "new" / "one", "--run-dir x")


def test_ranks_that_memory_does_not_hold() -> None:
    preflight.check_memory(100, 100 * preflight.LEAST_BYTES_OF_A_RANK)
    with pytest.raises(UserError, match=r"100 ranks .* at least 29.3 GiB .* start at most 99 here"):
        preflight.check_memory(100, 100 * preflight.LEAST_BYTES_OF_A_RANK - 1)
    assert devices.available_memory(swap=True) > 1 << 28


def test_the_launcher_tells_it_in_one_line_and_starts_nothing(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "hvd_cifar.launch"]
    words += ["-np", "3", "train", "--virtual-shards", "4", "--data-dir", str(tmp_path / "d")]
    environ = {**os.environ, "LC_ALL": "C", "PYTHONPATH": str(Path(preflight.__file__).parents[2])}
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, env=environ)
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (2, "")
    assert said == ["hvd_cifar: --virtual-shards 4: 3 ranks do not divide them; start 1, 2, 4 ranks"]
    assert not any(line.endswith((" tensorflow", " keras")) for line in imports)
    assert list(tmp_path.iterdir()) == []
