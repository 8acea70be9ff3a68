"""Facts about ranks: which of them share a host, and how unlike hosts are named."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hvd_cifar.runtime.ranks import RankFacts, differences, host_names, hosts_of, unlike_hardware
from hvd_cifar.runtime.watch import Peer

ONE = RankFacts(
    host="a",
    local_rank=0,
    local_size=1,
    device="/CPU:0",
    threads=2,
    processor="EPYC",
    rounding="1024 KB avx2",
    kind="x86_64",
    kernels="TensorFlow's",
    precision="float32",
    peer=Peer("a", 1, ("127.0.0.1", 1), ""),
)


def _ranks(*hosts: tuple[str, int], in_turn: bool) -> list[RankFacts]:
    """The ranks of hosts (name, number of ranks), one host after the other, or with one rank of each host in turn."""
    places = [(host, local) for host, (_, count) in enumerate(hosts) for local in range(count)]
    if in_turn:
        places.sort(key=lambda place: (place[1], place[0]))
    return [
        replace(ONE, host=hosts[host][0], local_rank=local, local_size=hosts[host][1], processor=f"P{host}")
        for host, local in places
    ]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(
    "hosts",
    [[("a", 4)], [("a", 2), ("a", 2)], [("a", 3), ("b", 1), ("a", 2)], [("a", 1), ("a", 3), ("a", 2), ("b", 3)]],
)
def test_ranks_are_told_apart_by_host_also_where_names_repeat(hosts: list[tuple[str, int]], in_turn: bool) -> None:
    ranks = _ranks(*hosts, in_turn=in_turn)
    firsts = hosts_of(ranks)
    assert [ranks[first].processor for first in firsts] == [facts.processor for facts in ranks]
    assert all(ranks[first].local_rank == 0 for first in firsts)
    assert len(set(host_names(ranks))) == len(hosts)


def test_unlike_hosts_are_named_each_once_in_the_order_of_the_ranks() -> None:
    ranks = [*_ranks(("c", 2), ("a", 2), ("b", 1), in_turn=False)]
    assert differences(ranks, lambda facts: facts.kernels) == ""
    assert differences(ranks, lambda facts: "x" if facts.host == "a" else "y") == "y on c, b; x on a"
    many = [replace(ONE, host=f"n{i}") for i in range(64)]
    assert differences([*many, replace(ONE, host="odd", threads=1)], lambda facts: facts.hardware) == (
        "2 threads of EPYC on n0, n1, n2, n3 and 60 more; 1 thread of EPYC on odd"
    )


def test_processors_of_one_name_may_differ() -> None:
    assert unlike_hardware([ONE, ONE]) == ""
    assert unlike_hardware([ONE, replace(ONE, rounding="512 KB avx2")]) == "processors of the same name differ"
    gpu = replace(ONE, host="b", kind="GPU", device="/GPU:0", threads=0, processor="H100", rounding="")
    assert unlike_hardware([ONE, gpu]) == "2 threads of EPYC on a; H100 on b"
