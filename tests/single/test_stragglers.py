"""When the ranks' times are gathered, and which rank is slow."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from hvd_cifar.extensions import stragglers
from hvd_cifar.training import progress
from hvd_cifar.training.progress import WaitClock


def test_after_a_rollback_times_are_gathered_anew() -> None:
    """From step 950 to 0. A step takes 0.1 s, 0.09 of it computation."""
    clock: Any = SimpleNamespace(seconds=0.0, paused=contextlib.nullcontext)
    waited = 0.0

    def take() -> float:
        nonlocal waited
        found, waited = waited, 0.0
        return found

    seen: list[tuple[int, list[float], list[float]]] = []
    reporter = SimpleNamespace(
        ranks=lambda step, **by_rank: seen.append((step, by_rank["compute_seconds"], by_rank["wait_seconds"]))
    )
    run: Any = SimpleNamespace(step=0, world=SimpleNamespace(host="h"), reporter=reporter)
    run.progress = SimpleNamespace(clock=clock, check_losses=lambda: None, waits=SimpleNamespace(take=take))
    run.ranks = SimpleNamespace(all_gather_object=lambda value: [value])
    run.is_due = lambda every: run.step % every == 0
    found = stragglers.Stragglers()
    found.on_start(run)
    for last in (950, 300):
        run.step = 0
        if last == 300:
            found.on_rollback(run)
        while run.step < last:
            run.step, waited, clock.seconds = run.step + 1, waited + 0.01, clock.seconds + 0.1
            found.on_step(run)
    assert [step for step, *_ in seen] == [*range(100, 1000, 100), 100, 200, 300]
    assert all(computes == pytest.approx([0.09]) and waits == pytest.approx([0.01]) for _, computes, waits in seen)


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
