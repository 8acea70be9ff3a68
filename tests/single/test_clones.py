"""Cloned machines: hosts that share a name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.errors import STALLED
from tests.ranks import CHECKOUT

# Rank 0 ends a run whose rank 1 does not answer.
END = """
import os, socket, sys
from hvd_cifar.runtime.stalls import Lost, Verdict
from hvd_cifar.runtime.watch import Peer, Watch
watch, host = Watch(seconds=0), socket.gethostname()
watch.join([Peer(host, os.getpid(), ("10.0.0.1", 1)), Peer(host, int(sys.argv[1]), (sys.argv[2], 1))])
watch._end(Verdict(lost=[Lost(1, host, 0, "step", "it does not answer")], ends=True), [], 60)
"""


@pytest.mark.parametrize(("address", "is_killed"), [("10.0.0.1", True), ("10.0.0.2", False)])
def test_only_a_process_of_this_host_is_killed(address: str, is_killed: bool, tmp_path: Path) -> None:
    """On a clone the process id is that of some other process."""
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            words = [sys.executable, "-c", END, str(other.pid), address]
            done = subprocess.run(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, timeout=60)
            assert done.returncode == STALLED
            try:
                assert other.wait(60 if is_killed else 4) == -9 and is_killed
            except subprocess.TimeoutExpired:
                assert not is_killed
        finally:
            other.kill()
