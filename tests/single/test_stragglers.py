"""When the ranks' times are gathered, and which rank is slow."""

from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from hvd_cifar.extensions import stragglers
from hvd_cifar.training import step_times
from hvd_cifar.training.step_times import StepTimes, Times


def test_after_a_rollback_times_are_gathered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 950 to 0. A step takes 0.1 s, 0.09 of it computation."""
    clock: Any = SimpleNamespace(seconds=0.0, paused=contextlib.nullcontext)
    progress: Any = SimpleNamespace(clock=clock, check_losses=lambda: None)
    steps = 0

    def take() -> Times:
        nonlocal steps
        found, steps = Times(steps, 0.09 * steps, 0.01 * steps), 0
        return found

    seen: list[tuple[int, list[float], list[float]]] = []
    reporter: Any = SimpleNamespace(
        ranks=lambda step, **by_rank: seen.append((step, by_rank["step_seconds"], by_rank["compute_seconds"]))
    )
    progress.times = SimpleNamespace(take=take)
    ranks = SimpleNamespace(gather=lambda value: [value])
    world = SimpleNamespace(host="h")
    run: Any = SimpleNamespace(step=0, world=world, progress=progress, ranks=ranks, reporter=reporter)
    run.is_due = lambda every: run.step % every == 0
    found = stragglers.Stragglers()
    found.on_start(run)
    for last in (950, 300):
        run.step = 0
        if last == 300:
            found.on_rollback(run)
        while run.step < last:
            run.step, steps, clock.seconds = run.step + 1, steps + 1, clock.seconds + 0.1
            found.on_step(run)
    assert [step for step, *_ in seen] == [*range(100, 1000, 100), 100, 200, 300]
    assert all(each == pytest.approx(0.1) and computes == [0.09] for _, (each,), computes in seen)


def test_a_clock_that_is_set_back_gives_no_negative_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an hour, once during the first step's computation and once while its sums are waited for."""
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(step_times, "clock", lambda: tf.constant(now, tf.float64))
    times = StepTimes()
    for _ in times.each("b"):
        now -= 3600
        times.on_gradients([])
        now -= 3600
        times.on_sums([])
    found = times.take()
    assert found.steps == 1 and found.compute >= 0 and found.wait >= 0
    assert stragglers.slow_ranks([stragglers.Seen("h", found, 0.1)]) == {}


@pytest.mark.parametrize(("compute", "slow"), [([1, 2], [1]), ([1, 1.3], []), ([1, 1, 1], []), ([3, 1, 1, 4], [0, 3])])
def test_slow_ranks(compute: list[float], slow: list[int]) -> None:
    found = stragglers.slow_ranks(
        [stragglers.Seen(f"n{rank}", Times(10, own, 1), 0.2) for rank, own in enumerate(compute)]
    )
    assert list(found) == slow and all(reason.startswith("compute: ") for reason in found.values())
