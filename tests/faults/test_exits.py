"""Code of a user that ends its own process: code 0 means that the work is done, and a line names the rank."""

from __future__ import annotations

from pathlib import Path

from hvd_cifar.training.run_dir import read_summary
from tests.faults.jobs import Running, start

ENDS = """
import os
import sys

import hvd_cifar

class Ends(hvd_cifar.Callback):
    def on_step(self, run):
        if run.step == 3 and run.world.rank == run.world.size - 1:
            {call}
"""


def test_a_callback_cannot_end_a_run_as_if_it_were_complete(embedded: Path, tmp_path: Path) -> None:
    """One rank that calls os._exit(0), the second of two with sys.exit(0), and with a code of its own; at once."""
    jobs: list[tuple[Running, int, str]] = []
    for ranks, call, code in ((1, "os._exit(0)", 1), (2, "sys.exit(0)", 1), (1, "sys.exit(7)", 7)):
        program = tmp_path / f"ends{len(jobs)}.py"
        program.write_text(ENDS.replace("{call}", call))
        pace = ["--callbacks", f"{program}:Ends"]
        job = start(["-np", ranks], embedded, tmp_path / f"run{len(jobs)}", "--max-steps", 6, pace=pace)
        jobs.append((job, code, f"hvd_cifar: rank {ranks - 1}"))
    try:
        for job, code, rank in jobs:
            assert job.wait() == code, job.said()
            lines = [line for line in job.said().splitlines() if "ended first" in line]
            assert len(lines) == 1 and lines[0].startswith(rank) and "Traceback" not in job.said(), job.said()
            assert read_summary(job.run_dir) == {}
    finally:
        for job, _, _ in jobs:
            job.end()
