"""When the ranks' times are gathered."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_cifar.distributed import collectives
from hvd_cifar.training import stragglers
from hvd_cifar.training.step_times import Times


def test_after_a_rollback_times_are_gathered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """From step 950 to 0. A step takes 0.1 s, 0.09 of it computation."""
    monkeypatch.setattr(collectives, "all_gather_object", lambda value: [value])
    clock: Any = SimpleNamespace(seconds=0.0, paused=contextlib.nullcontext)
    progress: Any = SimpleNamespace(step=0, clock=clock, check_losses=lambda: None, watch=SimpleNamespace(address="a"))
    steps = 0

    def take() -> Times:
        nonlocal steps
        found, steps = Times(steps, 0.09 * steps, 0.01 * steps), 0
        return found

    seen: list[tuple[int, list[float], list[float]]] = []
    reporter: Any = SimpleNamespace(
        ranks=lambda step, **by_rank: seen.append((step, by_rank["step_seconds"], by_rank["compute_seconds"]))
    )
    run: Any = SimpleNamespace(step=0, world=SimpleNamespace(host="h"))
    run.is_due = lambda every: run.step % every == 0
    found = stragglers.Stragglers(progress, SimpleNamespace(take=take), reporter)  # type: ignore[arg-type]
    for last in (950, 300):
        run.step = 0
        if last == 300:
            found.on_rollback(run)
        while run.step < last:
            run.step, steps, clock.seconds = run.step + 1, steps + 1, clock.seconds + 0.1
            found.on_step(run)
    assert [step for step, *_ in seen] == [*range(100, 1000, 100), 100, 200, 300]
    assert all(each == pytest.approx(0.1) and computes == [0.09] for _, (each,), computes in seen)
