"""Where a run is: which step a loss belongs to, requests, and the clock of the steps."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvd_cifar.errors import Preempted, TrainingError
from hvd_cifar.training.progress import Progress, StepClock
from hvd_cifar.training.train import Trainer


class _Result:
    """What a step returns: float [5] on a device."""

    def __init__(self, loss: float, requests: float = 0.0, seconds: float = 1e-3, saves: float = 0.0) -> None:
        self.value = np.array([loss, 0.25, requests, saves, seconds])

    def numpy(self) -> Any:
        return self.value


def _progress(first_step: int = 0, saved_step: int = -1) -> Progress:
    progress = Progress()
    progress.begin(first_step, saved_step)
    return progress


@pytest.mark.parametrize("at", [8, 9, 11])
@pytest.mark.parametrize("looked_at", [None, 8])
def test_the_step_whose_loss_is_not_finite_is_named(at: int, looked_at: int | None) -> None:
    progress = _progress(7, 4)
    with pytest.raises(TrainingError, match=f"loss = inf at step {at}; the checkpoint of step 4 is kept"):
        for step in range(8, 12):
            progress.add([], _Result(np.inf if step == at else 1.0))
            if step == looked_at:
                progress.check_losses()
        progress.check_losses()


def test_a_checkpoint_whose_own_weights_give_that_loss_is_named() -> None:
    for saved, is_own in ((3, False), (4, True)):
        with pytest.raises(TrainingError, match=rf"the checkpoint of step {saved} is kept(.*)") as raised:
            _progress(4, saved).add([], _Result(np.nan))
        assert ("kept, but its weights give this loss" in str(raised.value)) == is_own


def test_the_newest_loss_and_any_rank_s_request_are_kept() -> None:
    progress = _progress()
    for loss, requests in ((3.0, 0.0), (2.0, 1.0), (1.0, 0.0)):
        progress.add([], _Result(loss, requests, saves=requests))
    assert not progress.stop_requested  # the first step's result told that steps are short
    progress.check_losses()
    assert (progress.step, progress.loss, progress.stop_requested, progress.flags["save"]) == (3, 1.0, True, 1.0)
    assert progress.kept == "nothing was saved"
    progress.saved()
    assert progress.kept == "the checkpoint of step 3 is kept" and progress.flags["save"] == 0


@pytest.mark.parametrize(("seconds", "seen_at"), [(3.0, 2), (1.0, 2), (0.4, 3), (0.11, 10), (0.0, None)])
def test_a_request_is_seen_within_a_second_or_a_step(seconds: float, seen_at: int | None) -> None:
    """By the steps' time that travels with them, not by this rank's clock: ranks must look at the same steps."""
    progress = _progress()
    progress.add([], _Result(1.0, seconds=seconds))
    while not progress.stop_requested and progress.step < 100:
        progress.add([], _Result(1.0, requests=1.0, seconds=seconds))
    assert (progress.step if progress.stop_requested else None) == seen_at


def test_the_clock_leaves_pauses_out_also_within_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = StepClock()

    def wait(seconds: float) -> None:
        now[0] += seconds

    wait(1)
    with clock.paused():
        wait(10)
        with clock.paused():
            wait(100)
        wait(1000)
    wait(2)
    assert clock.seconds == 3


def test_a_run_stops_only_where_its_step_is_saved() -> None:
    """A request may be noticed after the callback that saves; the next step's is then the one that saves."""
    progress = _progress(5, 3)
    progress.flags["stop"] = 1.0
    run: Any = SimpleNamespace(step=5, total_steps=10, run_dir="r", progress=progress, warn=lambda line: None)
    trainer = Trainer.__new__(Trainer)
    trainer.run = run
    trainer._stop_where_asked()
    progress.saved_step = 5
    with pytest.raises(Preempted):
        trainer._stop_where_asked()
