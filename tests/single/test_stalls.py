"""Verdicts on ranks that wait, time-outs, and the line that names a rank."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from typing import Any

import pytest

from hvd_cifar.runtime import channel
from hvd_cifar.runtime.stalls import FACTOR, FLOOR, Lost, Status, judge, lost_ranks
from hvd_cifar.runtime.watch import Watch


def _status(rank: int, position: int = 9, waits: bool = True, idle: float = 8.0) -> Status:
    return Status(rank, f"host{rank}", 4, "step", position, idle, waits)


@pytest.mark.parametrize(
    ("statuses", "absent", "lost"),
    [
        ([_status(0), _status(2)], {1: ("b", "it does not answer")}, [1]),
        ([_status(0), _status(1, waits=False)], {}, [1]),  # one place, and it does not wait
        ([_status(0), _status(1, position=8)], {}, [1]),  # it waits elsewhere
        ([_status(0), _status(1, waits=False, idle=2)], {}, None),  # it makes progress
        ([_status(0), _status(1)], {}, []),  # all wait: the network, or different collectives
        ([_status(0), _status(1, idle=2)], {}, None),
        ([_status(0, waits=False)], {}, [0]),
    ],
)
def test_verdicts(statuses: list[Status], absent: Any, lost: list[int] | None) -> None:
    found = judge(statuses, absent, limit=8.0)
    assert (None if found is None else [one.rank for one in found]) == lost


def test_time_outs_grow_with_what_is_seen() -> None:
    learned, given = Watch(None), Watch(5.0)
    assert (learned._limit("step"), given._limit("step")) == (FACTOR * FLOOR, 50.0)
    for phases in (learned, given):
        phases._durations["step"] = deque([90.0, 0.1, 0.2])  # the first one compiles
    assert (learned._limit("step"), given._limit("step")) == (FLOOR, 5.0)
    learned._durations["step"].append(20.0)
    assert learned._limit("step") == FACTOR * 20.0 and learned._limit("evaluation") == FACTOR * FLOOR


def test_a_phase_is_seen_once_it_has_ended_as_a_whole() -> None:
    """The first one may take long, also after another phase within it."""
    phases = Watch(None)
    with phases.phase("checkpoints"):
        with phases.phase("callback"):
            assert phases._limit("callback") == FACTOR * FLOOR
        assert phases._limit("callback") == FLOOR
        assert phases._limit("checkpoints") == FACTOR * FLOOR
    assert phases._limit("checkpoints") == FLOOR


def test_an_error_leaves_a_phase() -> None:
    """What follows, such as a rollback, does not count as a part of it."""
    phases = Watch(None)
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


def test_a_line_names_a_rank_and_is_read() -> None:
    lost = Lost(2, "node3", 120, "step", "its process is stopped (SIGSTOP or a debugger)")
    text = f"rank 1 on node2: hvd_cifar: {lost}\nrank 1 on node2: hvd_cifar: {lost}\nhvd_cifar: other\n"
    assert lost_ranks(text) == [lost]


def test_who_is_silent_or_gone_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "SECONDS", 0.3)
    address = channel.listen("127.0.0.1", lambda question: {"asked": question})
    assert channel.ask(address, "look 3") == {"asked": "look 3"}
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, as the kernel does for a stopped process
        silent = server.getsockname()
        with pytest.raises(channel.NoAnswer, match=channel.SILENT):
            channel.ask(silent, "look 3")
    with pytest.raises(channel.NoAnswer, match=channel.GONE):
        channel.ask(silent, "look 3")
