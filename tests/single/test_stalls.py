"""Verdicts on ranks that wait, time-outs, slow ranks, and the line that names a rank."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.extensions.stragglers import Seen, slow_ranks
from hvd_cifar.runtime import channel
from hvd_cifar.runtime.inspect_process import computes
from hvd_cifar.runtime.phases import Phases
from hvd_cifar.runtime.stalls import FACTOR, FLOOR, Lost, Status, judge, lost_ranks
from hvd_cifar.runtime.watch import Peer, Watch
from hvd_cifar.training.step_times import Times


def _status(rank: int, position: int = 9, waits: bool = True, idle: float = 8.0, computes: bool = False) -> Status:
    return Status(rank, f"host{rank}", 1, 4, "step", position, idle, waits, computes)


@pytest.mark.parametrize(
    ("statuses", "absent", "lost", "slow", "ends"),
    [
        ([_status(0), _status(2)], {1: ("b", "it does not answer")}, [1], [], True),
        ([_status(0), _status(1, waits=False)], {}, [1], [], True),  # one place, and it does not wait
        ([_status(0), _status(1, position=8)], {}, [1], [], True),  # it waits elsewhere
        ([_status(0), _status(1, waits=False, computes=True)], {}, [], [1], False),
        ([_status(0), _status(1, waits=False, computes=True, idle=41)], {}, [1], [], True),
        ([_status(0), _status(1, waits=False, idle=2)], {}, [], [1], False),  # it makes progress
        ([_status(0), _status(1)], {}, [], [], True),  # all wait: the network, or different collectives
        ([_status(0), _status(1, idle=2)], {}, [], [], False),
        ([_status(0, waits=False)], {}, [0], [], True),
        ([_status(0, waits=False, computes=True)], {}, [], [], False),
    ],
)
def test_verdicts(statuses: list[Status], absent: Any, lost: list[int], slow: list[int], ends: bool) -> None:
    found = judge(statuses, absent, limit=8.0)
    assert [one.rank for one in found.lost] == lost and [s.rank for s in found.slow] == slow
    assert found.ends is ends


def test_time_outs_grow_with_what_is_seen() -> None:
    learned, given = Phases(None), Phases(5.0)
    assert (learned._limit("step"), given._limit("step")) == (FACTOR * FLOOR, 50.0)
    for phases in (learned, given):
        phases._durations["step"] = deque([90.0, 0.1, 0.2])  # the first one compiles
    assert (learned._limit("step"), given._limit("step")) == (FLOOR, 5.0)
    learned._durations["step"].append(20.0)
    assert learned._limit("step") == FACTOR * 20.0 and learned._limit("evaluation") == FACTOR * FLOOR


def test_a_phase_is_seen_once_it_has_ended_as_a_whole() -> None:
    """The first one may take long, also after another phase within it."""
    phases = Phases(None)
    with phases.phase("checkpoints"):
        with phases.phase("callback"):
            assert phases._limit("callback") == FACTOR * FLOOR
        assert phases._limit("callback") == FLOOR
        assert phases._limit("checkpoints") == FACTOR * FLOOR
    assert phases._limit("checkpoints") == FLOOR


def test_an_error_leaves_a_phase() -> None:
    """What follows, such as a rollback, does not count as a part of it."""
    phases = Phases(None)
    phases.mark("step")
    with contextlib.suppress(ValueError), phases.phase("evaluation"):
        raise ValueError
    assert phases._phase == "step"


def test_a_sign_of_life_is_progress_within_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    """The phase's duration is still that of its whole, and ranks that wait are not further than this one."""
    watch = Watch(0)
    monkeypatch.setattr(Watch, "_current", watch)
    watch.mark("set-up")
    watch._since -= 1000
    position = watch._position
    Watch.sign_of_life()
    assert watch._idle < 900 and watch._position == position
    watch.mark("step")
    assert watch._durations["set-up"][-1] > 900


def test_a_run_ends_the_answers_of_the_run_before() -> None:
    def answers(watch: Watch, peer: Peer) -> bool:
        try:
            return channel.ask(peer.address, peer.secret, {"ask": "hello"}) == {}
        except channel.NoAnswer as failure:
            assert str(failure) == channel.GONE
            return False

    found = []
    for _ in range(2):
        watch = Watch(60)
        peer = watch.listen(0, one_host=True)
        watch.join([peer])
        assert answers(watch, peer)
        found.append((watch, peer))
    assert not answers(*found[0])
    watch.stop()
    assert not answers(*found[1])


def test_a_process_of_a_cloned_host_is_not_taken_for_one_of_this_host() -> None:
    """Its process id is that of some other process here."""
    watch = Watch(0)
    here = watch.listen(0, one_host=True)
    watch.join([here, replace(here, address=("10.0.0.2", 1))])
    assert [watch._is_here(peer) for peer in watch._peers] == [True, False]


def test_a_line_names_a_rank_and_is_read() -> None:
    lost = Lost(2, "node3", 120, "step", "its process is stopped (SIGSTOP or a debugger)")
    text = f"rank 1 on node2: hvd_cifar: {lost}\nrank 1 on node2: hvd_cifar: {lost}\nhvd_cifar: other\n"
    assert lost_ranks(text) == [lost]


def test_only_those_with_the_secret_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a rank believe an answer of somebody else; and who is silent or gone is told apart."""
    monkeypatch.setattr(channel, "SECONDS", 0.3)
    asked: list[Any] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        asked.append(question)
        return {"a": 1}

    address, end = channel.listen("127.0.0.1", lambda: "secret", answer)
    assert channel.ask(address, "secret", {"ask": "status"}) == {"a": 1}
    with pytest.raises(channel.NoAnswer, match=channel.GONE):
        channel.ask(address, "other", {"ask": "end"})
    assert asked == [{"ask": "status"}]
    end()
    with pytest.raises(channel.NoAnswer, match=channel.GONE):
        channel.ask(address, "secret", {})
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, as the kernel does for a stopped process
        silent = server.getsockname()
        with pytest.raises(channel.NoAnswer, match=channel.SILENT):
            channel.ask(silent, "secret", {})
    with pytest.raises(channel.NoAnswer, match=channel.GONE):
        channel.ask(silent, "secret", {})


@pytest.mark.parametrize(
    ("what", "works"), [("os.pread(file, 4096, 0)", True), ("os.write(file, bytes(4096))", True), ("pass", False)]
)
def test_a_rank_that_waits_for_a_disk_or_a_download_does_not_hang(what: str, works: bool, tmp_path: Path) -> None:
    """It sleeps nearly all of the time."""
    if "tmpfs" in subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True).stdout:
        pytest.skip(f"{tmp_path} is not on a disk")
    path = tmp_path / "images"
    path.write_bytes(bytes(1 << 20))
    program = f"""
import os, time
file = os.open({str(path)!r}, os.O_RDWR)
os.fsync(file)
print("begins", flush=True)
while True:
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    {what}
    time.sleep(0.1)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        found = computes(process.pid)
        process.kill()
    assert found == works


def _seen(host: int, compute: float, wait: float, links: dict[int, float] | None = None) -> Seen:
    rates = {f"10.0.0.{h}": r for h, r in (links or {}).items()}
    return Seen(f"n{host}", f"10.0.0.{host}", Times(10, compute, wait), (compute + wait) / 10, rates)


@pytest.mark.parametrize(
    ("ranks", "slow"),
    [
        ([_seen(1, 1, 1), _seen(2, 2, 0.1)], {1: "compute"}),
        ([_seen(1, 1, 1), _seen(2, 1.3, 0.7)], {}),
        ([_seen(1, 1, 3), _seen(2, 1, 3), _seen(3, 1, 3)], {}),  # no links between hosts
        ([_seen(1, 1, 3, {2: 9e7}), _seen(2, 1, 3, {3: 1e6}), _seen(3, 1, 3, {1: 1e6})], {2: "network"}),
        ([_seen(1, 1, 3, {2: 1e6}), _seen(2, 1, 3, {1: 1e6})], {0: "network", 1: "network"}),  # both ends of one link
        ([_seen(1, 1, 0.2, {2: 1e6}), _seen(2, 1, 0.2, {1: 1e6})], {}),  # nobody waits for it
    ],
)
def test_slow_ranks(ranks: list[Seen], slow: dict[int, str]) -> None:
    found = {rank: reason.partition(":")[0] for rank, reason in slow_ranks(ranks).items()}
    assert found == slow
    json.dumps(slow_ranks(ranks))
