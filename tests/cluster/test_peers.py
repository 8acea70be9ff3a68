"""The comparison with peers over hosts: ranks where they belong, and a limit that is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from hvd_cifar.data.cifar import CIFAR10
from tests.cluster.jobs import recorded
from tests.ranks import CHECKOUT

LINK, BITS_PER_SECOND = "50mbit", 50e6
BATCH = 8  # of a rank
STEP_BITS = 1_068_298 * 32  # each host sends and receives them in a step: the tutorial's gradients


def test_a_slow_link_slows_the_sides_that_communicate(need_hosts: None, tmp_path: Path) -> None:
    data, kept, output = tmp_path / "data", tmp_path / "kept", tmp_path / "rates.json"
    data.mkdir()
    for name in CIFAR10.files:  # black images of the first class
        with (data / name).open("wb") as file:
            file.truncate(CIFAR10.bytes_of(name))
    words = [sys.executable, "-m", "benchmarks.peers", "--data-dir", data, "--hosts", 2, "--link", LINK]
    words += ["--model", "tutorial", "--batch-size", BATCH, "--repeats", 1, "--seconds", 1]
    words += ["--only", "hvd_cifar", "--only", "limit", "--base", "hvd_cifar", "--keep", kept, "--output", output]
    done = subprocess.run([*map(str, words)], cwd=CHECKOUT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    (ours, ours_limited), (alone, alone_limited) = [
        (of_link["none"][0], of_link[LINK][0])
        for of_link in json.loads(output.read_text())["images_per_second"].values()
    ]
    most = 2 * BATCH / (STEP_BITS / BITS_PER_SECOND)  # that the link allows
    assert ours_limited < 1.3 * most < 0.7 * min(ours, alone, alone_limited)
    assert f"| {ours_limited / ours:.3f} (" in done.stdout
    facts = recorded(kept / "hvd_cifar" / "run")
    assert facts["hosts"] == ["node1", "node2"]
    assert facts["threads"] == len(os.sched_getaffinity(0)) // 2
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(kept) in " ".join(p.info["cmdline"] or [])]
