"""Data that is damaged during a run: the job ends with one line about the data, and no process is left."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.faults.jobs import start


def test_a_data_file_that_is_cut_is_named(embedded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what a user keeps in variables is neither printed nor written."""
    secret = "s3cr3t-7f1c"
    for name in ("AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HVD_CIFAR_TOKEN", "HOROVOD_TOKEN", "TF_TOKEN"):
        monkeypatch.setenv(name, secret)
    shutil.copytree(embedded, tmp_path / "data", copy_function=os.link)
    (file,) = (tmp_path / "data").rglob("data_batch_3.bin")
    whole = file.read_bytes()
    file.unlink()  # else the shared one is cut
    file.write_bytes(whole)
    job = start(["-np", 2], tmp_path / "data", tmp_path / "run")
    try:
        job.wait_for_step(5)
        os.truncate(file, 1000)
        code, said = job.wait(), job.said()
    finally:
        job.end()
    assert code == 2, said
    assert "has become shorter while it was read: restore it" in said
    assert "Traceback" not in said and "Bus error" not in said and "signal" not in said, said
    assert not job.left()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert {"config.json", "metrics.jsonl"} <= {path.name for path in files}
    assert secret not in said
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
