"""Which network joins hosts, from what they say of themselves; and whose output is whose."""

from __future__ import annotations

import pytest

from hvd_cifar.launch.cluster import network, ssh
from hvd_cifar.launch.cluster.hosts import Host, hosts_of_ranks, is_local
from hvd_cifar.launch.cluster.network import Card, Network, candidates
from hvd_cifar.launch.output import Errors


def _card(name: str, address: str, speed: int = 0) -> Card:
    return Card(name, address, f"{address.rpartition('.')[0]}.0/24", speed)


def _found(cards: dict[str, list[Card]], named: dict[str, str] | None = None) -> list[Network]:
    return candidates(cards, named or dict.fromkeys(cards, ""))


def _subnets(cards: dict[str, list[Card]], named: dict[str, str] | None = None) -> list[str]:
    return [network.subnet for network in _found(cards, named)]


def test_a_network_has_all_hosts_under_different_addresses() -> None:
    bridge = _card("docker0", "172.17.0.1")
    a = [bridge, _card("eth0", "10.0.0.1"), _card("wlan0", "192.168.1.5")]
    (found,) = _found({"a": a, "b": [bridge, _card("ens3", "10.0.0.2")]})
    assert (found.subnet, found.cards["b"].address) == ("10.0.0.0/24", "10.0.0.2")
    assert _found({"a": a, "b": []}) == []


def test_the_faster_network_comes_first_then_the_named_one() -> None:
    a = [_card("eth0", "10.0.0.1", 1000), _card("ib0", "10.1.0.1", 100_000)]
    b = [_card("eth0", "10.0.0.2", 1000), _card("ib0", "10.1.0.2", 100_000)]
    assert _subnets({"a": a, "b": b}) == ["10.1.0.0/24", "10.0.0.0/24"]
    slow = [_card("eth0", "10.0.0.2", 1000), _card("ib0", "10.1.0.2", 100)]
    assert _subnets({"a": a, "b": slow}) == ["10.0.0.0/24", "10.1.0.0/24"]  # as fast as its slowest card
    a, b = ([_card("eth0", f"10.0.0.{n}"), _card("eth1", f"10.1.0.{n}")] for n in (1, 2))
    assert _subnets({"a": a, "b": b}, {"a": "", "b": "10.1.0.2"}) == ["10.1.0.0/24", "10.0.0.0/24"]
    assert _subnets({"a": a, "b": b}, {"a": "", "b": "10.0.0.2"}) == ["10.0.0.0/24", "10.1.0.0/24"]


def test_routers_join_hosts_on_different_subnets() -> None:
    cards = {"a": [_card("eth0", "10.0.0.1")], "b": [_card("eth0", "10.0.1.1"), _card("ib0", "10.9.0.1", 9)]}
    assert _subnets(cards, {"a": "", "b": "10.0.1.1"}) == ["10.0.0.0/24,10.0.1.0/24"]
    assert _subnets(cards) == ["10.0.0.0/24,10.9.0.0/24"]


@pytest.mark.parametrize(("pairs", "worst"), [("ab ba cb bc db", "b"), ("ea eb ec ed de fa", "e"), ("ab ac", "c")])
def test_the_host_that_cannot_be_reached(pairs: str, worst: str) -> None:
    assert network.worst_host([(pair[0], pair[1]) for pair in pairs.split()], here="a") == worst


def test_hosts_of_ranks_and_local_ones() -> None:
    hosts = (Host("a", 2), Host("b", 1), Host("c", 4))
    assert hosts_of_ranks(hosts, 4) == ["a", "a", "b", "c"]
    assert is_local("localhost") and is_local("127.0.0.1")
    assert not is_local("192.0.2.1") and not is_local("no-such-host.invalid")
    for no_name in ("a..b", "a" * 64):  # which Python's resolver refuses in another way
        assert not is_local(no_name)


def test_a_command_reaches_the_program_over_ssh_word_for_word() -> None:
    assert ssh.words("b", ["python", "-c", "print('a b')"])[-2:] == ["b", """python -c 'print('"'"'a b'"'"')'"""]


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("a@b: Permission denied (publickey,password).\r\n", ("it asks for a password", "ssh-copy-id b")),
        ("x\nssh: connect to host b: timed out\n", ("connect to host b: timed out", "log in by hand: ssh b")),
        ("", ("the connection was lost", "log in by hand: ssh b")),
    ],
)
def test_what_ssh_says_becomes_advice(complaint: str, advice: tuple[str, str]) -> None:
    assert ssh.diagnose("b", complaint) == (f"ssh b: {advice[0]}", advice[1])


def test_lines_get_their_rank_and_host_in_front() -> None:
    said = b"[1,1]<stderr>:half [1,0]<stderr>:whole\n[1,0]<stderr>:hvd_cifar: for all\n[1,1]<stderr>:a line\n"
    said += b"[1,1]<stderr>:hvd_cifar: mine\n[1,0]<stderr>:1%\r[1,0]<stderr>:2%\r[1,1]<stderr>:re"
    shown = b"rank 0 on a: whole\nhvd_cifar: for all\nrank 1 on b: half a line\nrank 1 on b: hvd_cifar: mine\n"
    bar = b"rank 0 on a: 1%\r"  # a progress bar is shown while it is drawn
    assert b"".join(Errors(["a", "b"]).shown([said])) == shown + bar + b"rank 0 on a: 2%\r\nrank 1 on b: re\n"
