"""Jobs on the hosts of a test: started as a user starts them on the first host, and what they leave."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvd_cifar.launch.install import installer
from tests.cluster.hosts import Host
from tests.options import SMALL_NET
from tests.ranks import CHECKOUT


def launcher() -> list[str]:
    """`./run.sh`, or, in an environment that it would set up anew first, what it hands over to."""
    current = installer.is_current(installer.recorded_options(installer.read_record()))
    return [str(CHECKOUT / "run.sh")] if current else [sys.executable, "-m", "hvd_cifar.launch"]


def variables(host: Host) -> dict[str, str]:
    """A user's variables for a job: hosts share few cores here, and a rank that waits must not hold one."""
    path = os.pathsep.join([str(Path(sys.executable).parent), host.environment()["PATH"]])
    return host.environment() | {"PATH": path, "PYTHONPATH": str(CHECKOUT), "TF_CPP_MIN_LOG_LEVEL": "2"}


def training(data: Path, run_dir: Path, *options: str) -> list[str]:
    """A training of a small net on the embedded set, with a line every step; it ends after 4 steps.

    Overlap is off, since finding out the size of buckets takes longer than the steps.
    """
    short = ["--max-steps", "4", "--log-every", "1", "--global-batch-size", "32"]
    short += ["--eval-every", "0", "--overlap", "off"]
    place = ["--dataset", "synthetic", "--data-dir", str(data), "--run-dir", str(run_dir)]
    return ["train", "--model", SMALL_NET, *place, *short, *options]


def losses(run_dir: Path) -> list[float]:
    """The loss of each step, as the run wrote it."""
    events = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [event["loss"] for event in events if "learning_rate" in event]


def recorded(run_dir: Path) -> dict[str, Any]:
    """What a run wrote down about itself at its start."""
    found: dict[str, Any] = json.loads((run_dir / "config.json").read_text())["run"]
    return found


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 120) -> None:
    """Return when something has come true; fail after a time that no sound machine needs."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)
