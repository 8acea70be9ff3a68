"""When the ranks' times are gathered, and which rank is slow."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

from hvd_cifar.extensions import stragglers
from hvd_cifar.training import progress
from hvd_cifar.training.progress import WaitClock


def test_a_slow_rank_is_named_once_after_three_gatherings() -> None:
    """This rank computes 0.09 s of a step of 0.1 s, and the other one 0.18 s."""
    clock: Any = SimpleNamespace(seconds=0.0, paused=contextlib.nullcontext)
    steps: list[int] = []
    reporter = SimpleNamespace(ranks=lambda step, **by_rank: steps.append(step))
    run: Any = mock.Mock(step=0, world=SimpleNamespace(host="h"), reporter=reporter)
    found = stragglers.Stragglers()

    def gather(own: stragglers.Seen) -> list[stragglers.Seen]:
        assert (own.compute, own.wait) == pytest.approx((0.09, 0.01))
        return [own, own, own._replace(host="slow", compute=0.18)]

    run.progress.clock, run.ranks.all_gather_object = clock, gather
    run.progress.waits.take = lambda: 1.0
    run.is_due = lambda every: run.step % every == 0
    found.on_start(run)
    for last, told in ((250, 0), (450, 1)):
        while run.step < last:
            run.step, clock.seconds = run.step + 1, clock.seconds + 0.1
            found.on_step(run)
        assert run.warn.call_count == told
    assert steps == [100, 200, 300, 400]
    assert "rank 2 on slow is slow since step 300, compute: 180.0 ms a step" in run.warn.call_args.args[0]


def test_waits_are_added_up_and_a_clock_that_is_set_back_gives_no_negative_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(progress, "clock", lambda: tf.constant(now, tf.float64))
    waits = WaitClock()
    for seconds, taken in (((2, 3), 5), ((1,), 1), ((-3600,), 0), ((4,), 4)):
        for one in seconds:
            now += 1
            waits.on_gradients([])
            assert waits.is_running()
            now += one
            waits.on_sums([])
            assert not waits.is_running()
        assert waits.take() == pytest.approx(taken)


@pytest.mark.parametrize(("compute", "slow"), [([1, 2], [1]), ([1, 1.3], []), ([1, 1, 1], []), ([3, 1, 1, 4], [0, 3])])
def test_slow_ranks(compute: list[float], slow: list[int]) -> None:
    found = stragglers.slow_ranks([stragglers.Seen(f"n{rank}", own, 0.1) for rank, own in enumerate(compute)])
    assert list(found) == slow and all(reason.startswith("compute: ") for reason in found.values())
