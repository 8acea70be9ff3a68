"""Hosts for the sides: namespaces of this machine (tests.cluster.hosts), each with its share of the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hvd_cifar.errors import UserError
from tests.cluster.hosts import INTERFACE, PREFIX, Cluster, Host, cluster, reason_to_skip

NO_LIMIT = "none"  # the link that is always measured
# Linux's default. BBR is unsuitable: after a limit is set, it still assumes the earlier round-trip time of
# microseconds, and for seconds sends four packets at a time.
CONGESTION_CONTROL = "cubic"


def check(hosts: int, ranks: int, links: Sequence[str]) -> None:
    """UserError where this machine cannot make the hosts, or ranks or links do not fit them."""
    if hosts == 1:
        if links:
            raise UserError(f"--link {links[0]}: one host has no link; add --hosts 2")
        return
    if ranks % hosts:
        raise UserError(f"--ranks {ranks}: not a multiple of --hosts {hosts}; each host has as many ranks")
    if hosts > len(cores := os.sched_getaffinity(0)):
        raise UserError(f"--hosts {hosts}: each needs a core of its own, and there are {len(cores)}; lower it")
    if reason := reason_to_skip():
        raise UserError(f"--hosts {hosts}: {reason}")


@contextmanager
def pinned_hosts(count: int, folder: Path) -> Iterator[Cluster]:
    """Hosts that share the cores of this process evenly; they end with the block. `folder` does not exist."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // count)
    with cluster(count, folder) as made:
        for i, host in enumerate(made):
            route = [f"{PREFIX}.0/24", "dev", INTERFACE, "proto", "kernel", "scope", "link", "src", host.address]
            host.must("ip", "route", "change", *route, "congctl", CONGESTION_CONTROL)
            own = {cores[(i * share + j) % len(cores)] for j in range(share)}
            os.sched_setaffinity(host.pid, own)  # children of its sshd inherit it
        yield made


def words_on(host: Host, words: Sequence[str]) -> list[str]:
    """The command that runs `words` on a host and its cores."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(host.pid))))
    return host.words(["taskset", "--cpu-list", cores, *words])


def limit(hosts: Cluster, link: str) -> None:
    """Limit all hosts to a rate in both directions; "none" removes the limit."""
    for host in hosts:
        if link == NO_LIMIT:
            hosts.restore(host)
        else:
            hosts.slow(host, link)
