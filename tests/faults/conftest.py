"""What tests of disturbed jobs compare with: a job that is left alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def alone(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a job of `COURSE` on one rank that nothing disturbs: do not write there."""
    # Not above: it imports TensorFlow, whose notes pytest keeps to itself only after it has read this file.
    from tests.faults.jobs import COURSE, start

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "alone"  # one for all workers
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "run" / "summary.json").exists():
            evaluated = ["--eval-every", 25, "--checkpoint-every", 25, "--record-examples"]
            job = start(["-np", 1], embedded, folder / "run", *COURSE, *evaluated, pace=())
            try:
                assert job.wait(600) == 0, job.said()
            finally:
                job.end()
    return folder / "run"
