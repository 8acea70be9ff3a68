"""A rank that has a tenth of a core: named as slow by its computation, once, and recorded."""

from __future__ import annotations

import itertools
import json
import signal
import time
from pathlib import Path

import pytest

from tests.faults.jobs import start
from tests.options import TUTORIAL

pytestmark = pytest.mark.slow

# Seconds that the rank stands still, and that it runs. A rank of a busy machine is not as much slower than another.
# Both are short: a step's computation could fit between two long pauses, and then nothing would slow it.
SHARES = {signal.SIGSTOP: 0.09, signal.SIGCONT: 0.01}


def test_a_tenth_of_a_core(embedded: Path, tmp_path: Path) -> None:
    options = ["--checkpoint-every", 10, "--threads-per-rank", 1, "--global-batch-size", 8]
    running = start(["-np", 2], embedded, tmp_path / "run", *options, net=TUTORIAL, pace=())
    try:
        running.wait_for_step(5)
        rank = running.ranks()[1]
        gathered = 0
        for number, share in itertools.cycle(SHARES.items()):
            rank.send_signal(number)
            time.sleep(share)
            # It is named after three gatherings in a row, the last of which may not be counted; not again by two more.
            if number == signal.SIGCONT and not running.has_said("is slow since step"):
                gathered = _gathered(running.run_dir)
                assert gathered < 30, running.said()
            elif number == signal.SIGCONT and _gathered(running.run_dir) >= gathered + 3:
                break
        assert running.said().count("is slow since step") == 1, running.said()
        assert "hvd_cifar: rank 1 on" in running.said() and ", compute: " in running.said()
    finally:
        running.end()


def _gathered(run_dir: Path) -> int:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return sum(json.loads(line)["event"] == "ranks" for line in lines)
