"""Which network a job takes on real hosts, and what is said where it cannot start: one line, before any rank."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, variables


def _dry_run(cluster: Cluster, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """A job of a rank on each of two hosts, as it would be started."""
    first = cluster[0]
    hosts: list[str | Path] = ["--hostfile", cluster.hostfile(1, 1)]
    return first.run([*launcher(), "--dry-run", *hosts, *words], env=variables(first))


def test_cards_that_lead_nowhere_are_not_taken(two_hosts: Cluster) -> None:
    """A container bridge with the same address on each host, and a second network without cables."""
    for host, number in zip(two_hosts, (1, 2), strict=True):
        two_hosts.add_card(host, "docker0", "10.1.0.1/24", connected=False)
        two_hosts.add_card(host, "ib0", f"10.2.0.{number}/24", connected=False)
    # The names lead to the network without cables: it is tried first.
    for host in two_hosts:
        two_hosts.set_names(host, two_hosts.names() + "10.2.0.1 node1\n")
    done = _dry_run(two_hosts, "train")
    assert done.returncode == 0, done.stderr
    assert "btl_tcp_if_include 10.77.0.0/24 " in done.stdout and "oob_tcp_if_include 10.77.0.0/24 " in done.stdout
    for host in two_hosts:
        two_hosts.set_names(host, two_hosts.names())
        for card in ("docker0", "ib0"):
            host.must("ip", "link", "del", card)


def test_ports_that_mpi_listens_at_are_tried_for_mpi(two_hosts: Cluster) -> None:
    """A firewall that lets the system's usual ports through: not enough for MPI."""
    rule = ["sport", "1024-1200", "blackhole"]
    two_hosts[1].must("ip", "rule", "add", *rule)
    done = _dry_run(two_hosts, "train")
    two_hosts[1].must("ip", "rule", "del", *rule)
    assert done.returncode == 2
    assert "node1 cannot reach node2 at 10.77.0.2, port 1024 (eth0, 10.77.0.0/24)" in done.stderr
