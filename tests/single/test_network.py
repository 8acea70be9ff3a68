"""Which network joins hosts, from what they say of themselves; and whose output is whose."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar.launch.cluster import network, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.cluster.network import Card, Report, candidates
from hvd_cifar.launch.cluster.streams import NamedLines, by_rank


def _report(*cards: Card) -> Report:
    return Report("x", cards)


def _card(name: str, address: str, speed: int = 0) -> Card:
    return Card(name, address, f"{address.rpartition('.')[0]}.0/24", speed)


def _found(reports: dict[str, Report], resolved: dict[str, str | None] | None = None) -> list[str]:
    return [network.subnet for network in candidates(reports, resolved or {})]


def test_a_network_has_all_hosts_under_different_addresses() -> None:
    bridge = _card("docker0", "172.17.0.1")
    a = _report(bridge, _card("eth0", "10.0.0.1"), _card("wlan0", "192.168.1.5"))
    b = _report(bridge, _card("ens3", "10.0.0.2"))
    assert _found({"a": a, "b": b}) == ["10.0.0.0/24"]
    found = candidates({"a": a, "b": b}, {})[0]
    assert found.card_names == ["ens3", "eth0"]
    assert found.cards["b"].address == "10.0.0.2"
    assert _found({"a": a, "b": _report(bridge)}) == []


def test_the_faster_network_comes_first_then_the_named_one() -> None:
    a = _report(_card("eth0", "10.0.0.1", 1000), _card("ib0", "10.1.0.1", 100_000))
    b = _report(_card("eth0", "10.0.0.2", 1000), _card("ib0", "10.1.0.2", 100_000))
    assert _found({"a": a, "b": b}) == ["10.1.0.0/24", "10.0.0.0/24"]
    slow = _report(_card("eth0", "10.0.0.2", 1000), _card("ib0", "10.1.0.2", 100))
    assert _found({"a": a, "b": slow}) == ["10.0.0.0/24", "10.1.0.0/24"]  # as fast as its slowest card
    a = _report(_card("eth0", "10.0.0.1"), _card("eth1", "10.1.0.1"))
    b = _report(_card("eth0", "10.0.0.2"), _card("eth1", "10.1.0.2"))
    assert _found({"a": a, "b": b}, {"a": "10.1.0.1", "b": "10.1.0.2"}) == ["10.1.0.0/24", "10.0.0.0/24"]
    assert _found({"a": a, "b": b}, {"a": "10.0.0.1", "b": "10.0.0.2"}) == ["10.0.0.0/24", "10.1.0.0/24"]


def test_hosts_on_different_subnets_meet_at_the_addresses_of_their_names() -> None:
    reports = {"a": _report(_card("eth0", "10.0.0.1")), "b": _report(_card("eth0", "10.0.1.1"))}
    assert _found(reports, {"a": "10.0.0.1", "b": "10.0.1.1"}) == ["10.0.0.0/24,10.0.1.0/24"]
    assert _found(reports, {"a": "10.0.0.1", "b": None}) == []


def test_this_machine_has_an_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own name may stand for a loopback address, and localhost does."""
    known = {"here": "127.0.1.1", "localhost": "127.0.0.1", "there": "192.0.2.7", "b": "10.0.1.1"}
    monkeypatch.setattr(socket, "gethostbyname", known.__getitem__)
    monkeypatch.setattr(network, "_own_address", lambda other: "10.0.0.1" if other == "192.0.2.7" else None)
    assert network.addresses(["here", "there", "b"]) == {"here": "10.0.0.1", "there": "192.0.2.7", "b": "10.0.1.1"}
    assert network.addresses(["localhost", "there"])["localhost"] == "10.0.0.1"
    assert network.addresses(["localhost", "b"])["localhost"] == "127.0.0.1"  # no route


def test_the_address_from_which_another_is_reached() -> None:
    assert network._own_address("127.0.0.5") == "127.0.0.1"
    assert network._own_address("255.255.255.255") is None


@pytest.mark.parametrize(
    ("pairs", "out"),
    [
        (["ab", "ba", "cb", "bc", "db"], ["b"]),
        (["ea", "eb", "ec", "ed", "de", "fa", "fb", "fc", "fd", "fe"], ["e", "f"]),
        (["ab", "ac"], ["c", "b"]),  # of this host all others
        ([], []),
    ],
)
def test_the_hosts_without_which_all_others_connect(pairs: list[str], out: list[str]) -> None:
    faults = [network.NoWay(one, other, _card("eth0", "10.0.0.1")) for one, other in map(tuple, pairs)]
    assert network.unusable(faults, here="a") == out


def test_hosts_of_ranks_and_local_ones() -> None:
    hosts = (Host("a", 2), Host("b", 1), Host("c", 4))
    assert hosts_of_ranks(hosts, 4) == ["a", "a", "b", "c"]
    assert is_local("localhost") and is_local("127.0.0.1")
    assert not is_local("192.0.2.1") and not is_local("no-such-host.invalid")
    for no_name in ("a..b", "a" * 64):  # which Python's resolver refuses in another way
        assert not is_local(no_name) and network._resolve(no_name) is None


def test_a_command_reaches_the_program_over_ssh_word_for_word() -> None:
    assert ssh.words("b", ["python", "-c", "print('a b')"])[-2:] == ["b", """python -c 'print('"'"'a b'"'"')'"""]


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("a@b: Permission denied (publickey,password).\r\n", "ssh b: it asks for a password: ssh-copy-id b"),
        ("Host key verification failed.", "ssh b: its key is not known here, or has changed: log in once by hand"),
        ("ssh: Could not resolve hostname b: Name or service not known", "ssh b: no such name"),
        ("something\nelse\n", "ssh b: else"),
        ("", "ssh b: the connection was lost"),
    ],
)
def test_what_ssh_says_becomes_advice(complaint: str, advice: str) -> None:
    explained = ssh.explain("b", complaint)
    assert explained.startswith(advice) and "\n" not in explained


TAGGED = (
    b"[1,0]<stdout>:\rbar 1[1,1]<stderr>:error, first half[1,0]<stdout>:\rbar 2 [1,x]<std[1,1]<stderr>: and second\n"
    b"[1,1]<stderr>:next\nmpirun says\n[1,2]<stdout>:\n[1,2]<stdout>:end"
)


@given(st.lists(st.integers(0, len(TAGGED))))
def test_tagged_output_is_told_apart_however_it_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(TAGGED)]
    said: dict[int | None, bytes] = {}
    for rank, piece in by_rank(TAGGED[a:b] for a, b in zip(edges, edges[1:], strict=False)):
        said[rank] = said.get(rank, b"") + piece
    assert said == {
        0: b"\rbar 1\rbar 2 [1,x]<std",
        1: b"error, first half and second\nnext\n",
        2: b"\nend",
        None: b"mpirun says\n",
    }


PERCENT = [b"rank 0 on a: 1%\r", b"rank 0 on a: 2%\r"]


def test_lines_get_their_rank_and_host_in_front() -> None:
    lines = NamedLines(["a", "b"])
    assert lines.add(1, b"half ") == b""
    assert lines.add(0, b"whole\nhvd_cifar: for all\n") == b"rank 0 on a: whole\nhvd_cifar: for all\n"
    assert lines.add(1, b"a line\nhvd_cifar: mine\nre") == b"rank 1 on b: half a line\nrank 1 on b: hvd_cifar: mine\n"
    assert lines.rest() == b"rank 1 on b: re\n"
    # A progress bar is shown while it is drawn.
    lines = NamedLines(["a"])
    assert [lines.add(0, piece) for piece in (b"\r1%", b"\r2%", b"\r3%")] == [b"rank 0 on a: \r", *PERCENT]
    assert lines.add(0, b"\r") == b"" and lines.add(0, b"\nend\n") == b"rank 0 on a: 3%\r\nrank 0 on a: end\n"
