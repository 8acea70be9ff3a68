"""What benchmarks.timeline reads from Horovod's timeline."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.timeline import Message, last_step, messages
from hvd_cifar.errors import UserError


def _events(tensor: int, ready: float, begin: float, end: float) -> list[dict[str, Any]]:
    times = [("B", "NEGOTIATE_ALLREDUCE", ready), ("E", "", begin), ("B", "ALLREDUCE", begin)]
    times += [("B", "MPI_ALLREDUCE", begin), ("E", "", end), ("E", "", end)]
    return [{"ph": kind, "name": name, "pid": tensor, "ts": now * 1000} for kind, name, now in times]


def test_messages_and_the_last_step() -> None:
    events = [{"ph": "M", "name": "process_name", "pid": 1}]
    for step in (0, 100, 200):
        events += _events(1, step + 10, step + 11, step + 40) + _events(2, step + 50, step + 51, step + 60)
    events += _events(3, 290, 291, 292)  # not of a step
    found = messages(events)
    assert len(found) == 7 and found[0] == Message(1, 10, 11, 40)
    of_step, start = last_step(found, 3)
    assert of_step == [Message(1, 210, 211, 240), Message(2, 250, 251, 260)] and start == 160
    with pytest.raises(UserError, match="4 steps"):
        last_step(found, 4)
