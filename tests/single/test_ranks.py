"""Facts about ranks: how unlike hosts are named."""

from __future__ import annotations

from dataclasses import replace

from hvd_cifar.runtime.ranks import RankFacts, differences, unlike_hardware
from hvd_cifar.runtime.watch import Peer

ONE = RankFacts(
    host="a",
    first=0,
    threads=2,
    processor="EPYC",
    rounding="1024 KB avx2",
    kind="x86_64",
    kernels="TensorFlow's",
    precision="float32",
    peer=Peer("a", ("127.0.0.1", 1)),
)


def test_unlike_hosts_are_named_each_once_in_the_order_of_the_ranks() -> None:
    assert differences([("c", "x"), ("a", "x")]) == ""
    assert differences([("c", "y"), ("c", "y"), ("a", "x"), ("b", "y")]) == "y on c, b; x on a"
    many = [replace(ONE, host=f"n{i}") for i in range(64)]
    assert unlike_hardware([*many, replace(ONE, host="odd", threads=1)]) == (
        "2 threads of EPYC on n0, n1, n2, n3 and 60 more; 1 thread of EPYC on odd"
    )


def test_processors_of_one_name_may_differ() -> None:
    assert unlike_hardware([ONE, ONE]) == ""
    assert unlike_hardware([ONE, replace(ONE, rounding="512 KB avx2")]) == "processors of the same name differ"
    gpu = replace(ONE, host="b", kind="GPU", threads=0, processor="H100", rounding="")
    assert unlike_hardware([ONE, gpu]) == "2 threads of EPYC on a; H100 on b"
