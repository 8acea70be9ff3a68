"""The comparison with peers over hosts runs, and prints a table."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from hvd_cifar.data.cifar import CIFAR10
from tests.cluster.jobs import recorded
from tests.ranks import CHECKOUT


def test_sides_that_communicate_take_turns_with_the_limit_on_two_hosts(need_hosts: None, tmp_path: Path) -> None:
    data, kept = tmp_path / "data", tmp_path / "kept"
    data.mkdir()
    for name in CIFAR10.files:  # black images of the first class
        with (data / name).open("wb") as file:
            file.truncate(CIFAR10.bytes_of(name))
    words = [sys.executable, "-m", "benchmarks.peers", "--data-dir", data, "--hosts", 2, "--link", "50mbit"]
    words += ["--model", "tutorial", "--batch-size", 8, "--repeats", 1, "--seconds", 1]
    words += ["--only", "hvd_cifar", "--only", "limit", "--base", "hvd_cifar", "--keep", kept]
    done = subprocess.run([*map(str, words)], cwd=CHECKOUT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done
    assert all(f"\n| hvd_cifar, 2 {what} | " in done.stdout for what in ("ranks", "processes that never communicate"))
    assert recorded(kept / "hvd_cifar" / "run")["hosts"] == ["node1", "node2"]
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(kept) in " ".join(p.info["cmdline"] or [])]
