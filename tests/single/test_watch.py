"""Verdicts on ranks that wait, time-outs, and the line that names a rank."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque
from typing import Any

import pytest

from hvd_cifar.runtime import watch as module
from hvd_cifar.runtime.watch import FACTOR, FLOOR, GONE, SILENT, Peer, Status, Watch, judge, lost_ranks


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
    assert (None if found is None else [status.rank for status, _ in found]) == lost


def test_time_outs_grow_with_what_is_seen() -> None:
    learned, given = Watch(None), Watch(5.0)
    assert (learned._limit("step"), given._limit("step")) == (FACTOR * FLOOR, 50.0)
    for phases in (learned, given):
        phases._durations["step"] = deque([90.0, 0.1, 0.2])  # the first one compiles
    assert (learned._limit("step"), given._limit("step")) == (FLOOR, 5.0)
    learned._durations["step"].append(20.0)
    assert learned._limit("step") == FACTOR * 20.0 and learned._limit("evaluation") == FACTOR * FLOOR


def test_a_phase_is_seen_once_it_has_ended_as_a_whole() -> None:
    """The first one may take long, also after another phase within it. An error ends it."""
    phases = Watch(None)
    phases.mark("step")
    with contextlib.suppress(ValueError), phases.phase("checkpoints"):
        with phases.phase("callback"):
            assert phases._limit("callback") == FACTOR * FLOOR
        assert phases._limit("callback") == FLOOR
        assert phases._limit("checkpoints") == FACTOR * FLOOR
        raise ValueError
    assert phases._limit("checkpoints") == FLOOR and phases._phase == "step"


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
    line = "rank 1 on node2: hvd_cifar: rank 2 on node3 hangs at step 120 (step): its process has ended\n"
    assert lost_ranks(f"{line}{line}hvd_cifar: other\n") == {2: "node3"}


def test_who_is_silent_or_gone_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.3)
    watch = Watch(0)
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, as the kernel does for a stopped process
        other = Peer("b", server.getsockname())
        assert asyncio.run(watch._ask(other, "look")) == SILENT
    assert asyncio.run(watch._ask(other, "look")) == GONE
