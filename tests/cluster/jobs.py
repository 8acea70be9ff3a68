"""Jobs on the hosts of a test: started as a user starts them on the first host, and what they leave."""

from __future__ import annotations

import json
import os
import sys
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


def recorded(run_dir: Path) -> dict[str, Any]:
    """What a run wrote down about itself at its start."""
    found: dict[str, Any] = json.loads((run_dir / "config.json").read_text())["run"]
    return found
