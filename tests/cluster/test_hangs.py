"""A cable that is pulled out during a step: the rank behind it is named, both sides end."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import runs
from hvd_cifar.errors import STALLED
from hvd_cifar.runtime.watch import HANGS
from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, training, variables
from tests.ranks import wait_for

LATEST = 30  # s from the time-out to the end


def test_a_host_that_cannot_be_reached(two_hosts: Cluster, embedded: Path, tmp_path: Path) -> None:
    first, second = two_hosts
    endless = ["--max-steps", "1000000", "--stall-seconds", "4", "--overlap", "auto"]
    words: list[str | Path] = [*launcher(), "--hostfile", two_hosts.hostfile(1, 1)]
    words += training(embedded, tmp_path / "run", *endless)
    output = tmp_path / "output"
    with output.open("wb") as file:
        job = first.start(words, env=variables(first), stdout=file, stderr=file)
    wait_for(lambda: max(runs.losses(tmp_path / "run"), default=0) >= 5, "steps", 200, job)
    two_hosts.cut(second)
    began = time.monotonic()
    try:
        code = job.wait(100)
        seconds = time.monotonic() - began
    finally:
        two_hosts.restore(second)
        wait_for(lambda: first.run(["ssh", "node2", "true"]).returncode == 0, "the bridge to let the cable in again")
    assert code == STALLED, output.read_text()
    assert seconds < 4 + LATEST and "no progress for 4 s" in output.read_text()
    ((rank, host, _, _, reason),) = HANGS.findall(output.read_text())
    assert (rank, host, reason) == ("1", "node2", "its host cannot be reached")
    wait_for(lambda: not second.processes("hvd_cifar"), "the end of the other side", 60)
