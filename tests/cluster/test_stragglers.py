"""One of three hosts has a slow link: its rank is named as slow by its network."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, training, variables


def test_a_slow_link_is_named(three_hosts: Cluster, embedded: Path, tmp_path: Path) -> None:
    three_hosts.slow(three_hosts[2], "20mbit")
    often = ["--max-steps", "60", "--checkpoint-every", "10"]
    words: list[str | Path] = [*launcher(), "--hostfile", three_hosts.hostfile(1, 1, 1)]
    words += training(embedded, tmp_path / "run", *often)
    done = three_hosts[0].run(words, env=variables(three_hosts[0]), timeout=500)
    three_hosts.restore(three_hosts[2])
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "is slow since step" in line]
    assert (
        line.startswith("hvd_cifar: rank 2 on node3 is slow since step") and ", network: links of node3 carry" in line
    )
