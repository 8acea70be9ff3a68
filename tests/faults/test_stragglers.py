"""A rank that has half of a core: named as slow by its computation, once, and recorded."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path

from tests.faults.jobs import start

HALF = 0.06  # s that the rank runs, and s that it stands still


def test_half_a_core(embedded: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    running = start(["-np", 2], embedded, run_dir, "--checkpoint-every", 25, "--threads-per-rank", 1)
    try:
        running.wait_for_step(5)
        rank = running.ranks()[1]
        for number in itertools.cycle((signal.SIGSTOP, signal.SIGCONT)):
            rank.send_signal(number)
            time.sleep(HALF)
            if number == signal.SIGCONT and _windows(run_dir) >= 5:
                break
        assert running.said().count("is slow since step") == 1, running.said()
        assert "hvd_cifar: rank 1 on" in running.said() and ", compute: " in running.said()
    finally:
        running.end()


def _windows(run_dir: Path) -> int:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == "ranks" for line in lines)
