"""An elastic job on one host that loses ranks, and what starts them: it ends with the weights of one left alone."""

from __future__ import annotations

import re
import signal
from functools import partial
from pathlib import Path

import pytest

from benchmarks import runs
from tests.faults.jobs import COURSE, STEPS, start
from tests.ranks import wait_for

OPTIONS = [*COURSE, "--checkpoint-every", 1000, "--eval-every", 0]


def test_a_killed_rank(alone: Path, embedded: Path, tmp_path: Path) -> None:
    """The other one goes on until the slot of the killed one has rested; then two."""
    job = start(["--elastic", "1:2", "--cool-down", "1:1"], embedded, tmp_path / "run", *OPTIONS)
    try:
        job.wait_for_step(20)
        copies = job.copies()
        job.send(signal.SIGKILL, "rank 0")
        job.wait_until(partial(job.has_said, "elastic: rank 0 on localhost is lost (exit code 137)"))
        job.wait_until(partial(job.has_said, "2 ranks go on instead of 1"))
        assert job.wait() == 0, job.said()
    finally:
        job.end()
    said = job.said()
    assert re.search(r"resumed from memory at step \d+", said), said
    assert not job.left() and not copies.exists()
    assert runs.steps(job.run_dir) == list(range(1, STEPS + 1))
    assert runs.losses(job.run_dir) == runs.losses(alone)
    assert runs.summary(job.run_dir)["weights_sha256"] == runs.summary(alone)["weights_sha256"]


@pytest.mark.slow
def test_a_killed_launcher(alone: Path, embedded: Path, tmp_path: Path) -> None:
    """Neither processes nor copies of the state are left; a resumed run ends with the weights of one left alone."""
    options = [*OPTIONS, "--checkpoint-every", 10]
    job = start(["--elastic", "1:2"], embedded, tmp_path / "run", *options)
    try:
        job.wait_for_step(40)
        copies = job.copies()
        assert copies.exists()
        job.send(signal.SIGKILL)
        wait_for(lambda: not job.left() and not copies.exists(), "the end of all", 60)
        assert not (job.run_dir / "summary.json").exists()  # the ranks were ended before they were done
    finally:
        job.end()
    again = start(["-np", 1], embedded, job.run_dir, *options)
    assert again.wait() == 0, again.said()
    assert runs.summary(job.run_dir)["weights_sha256"] == runs.summary(alone)["weights_sha256"]
