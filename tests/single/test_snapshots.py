"""Snapshots: offered, taken, evaluated, kept; and what is left of them when either side stops at any moment."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest

from hvd_cifar.extensions.best_weights import BestWeights
from hvd_cifar.extensions.remote_evaluation import RemoteEvaluation
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.training import snapshots
from hvd_cifar.training.callbacks import Run
from hvd_cifar.training.checkpoint import damage, find, restore
from hvd_cifar.training.evaluate import Confusion, Evaluation
from hvd_cifar.training.snapshots import Snapshots
from hvd_cifar.training.state import TrainState


def _state() -> TrainState:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="first")])
    state = TrainState(model)
    state.add("averages", MovingAverage(model.trainable_variables, 0.9).variables, core=True)
    return state


def _found(step: int, accuracy: float = 0.5) -> Evaluation:
    return Evaluation(accuracy, 1.5, 100, accuracy, 1, step=step, part="validation")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


@pytest.fixture
def ours(tmp_path: Path) -> Snapshots:
    (tmp_path / "config.json").touch()
    return Snapshots(tmp_path, _state(), 0)


def test_the_newest_one_is_taken_and_those_before_it_are_told(ours: Snapshots, tmp_path: Path) -> None:
    assert snapshots.take(tmp_path) is None and ours.pending() == []
    assert (ours.offer(10), ours.offer(20)) == ([], [10])
    taken = snapshots.take(tmp_path)
    assert taken is not None and snapshots.step_of(taken) == 20 and damage(taken) is None
    assert ours.offer(30) == [] and ours.pending() == [20, 30] and ours.results() == []
    snapshots.answer(taken, _found(20))
    assert ours.results() == [_found(20)] and ours.pending() == [30]
    ours.discard(20)
    assert ours.results() == [] and ours.pending() == [30]
    ours.close()
    assert _names(tmp_path) == ["config.json"]


def test_a_snapshot_is_what_the_weights_were(ours: Snapshots, tmp_path: Path) -> None:
    weight = ours.state.model.trainable_variables[0]
    before = weight.numpy()
    ours.offer(10)
    weight.assign(before + 1)
    path, other = snapshots.take(tmp_path), _state()
    assert path is not None
    restore(other, path, partial=True)
    assert (other.model.trainable_variables[0].numpy() == before).all() and int(other.step.numpy()) == 10


def test_the_best_one_is_kept_alone_and_found_again(ours: Snapshots, tmp_path: Path) -> None:
    seen = replace(_found(10, 0.4), confusion=Confusion(np.eye(3, dtype=np.int64), []))
    ours.keep(seen, step=10)  # evaluated by the ranks that train
    assert ours.best() == _found(10, 0.4)
    ours.offer(20)
    taken = snapshots.take(tmp_path)
    assert taken is not None
    snapshots.answer(taken, _found(20, 0.6))
    ours.keep(_found(20, 0.6), step=25)
    assert _names(tmp_path / "best") == ["step-20"] and find(tmp_path / "best") == tmp_path / "best" / "step-20"
    with pytest.raises(OSError):  # no snapshot of step 30 is there, and the present state is another step's
        ours.keep(_found(30), step=35)
    again = Snapshots(tmp_path, _state(), 40)
    assert again.best() == _found(20, 0.6)
    again.go_back(15)
    assert again.best() is None and _names(tmp_path / "best") == []


def test_a_run_that_goes_on_keeps_what_nobody_has_finished(ours: Snapshots, tmp_path: Path) -> None:
    for step in (10, 20, 30):
        ours.offer(step)
        taken = snapshots.take(tmp_path)
        assert taken is not None
        if step == 10:
            snapshots.answer(taken, _found(10))
    (tmp_path / "snapshots" / ".step-40.part").mkdir()
    again = Snapshots(tmp_path, _state(), 25)
    assert again.results() == [_found(10)] and again.pending() == [20]
    with pytest.raises(OSError):  # it was of a step that the run makes again
        snapshots.answer(tmp_path / "snapshots" / "step-30", _found(30))
    assert _names(tmp_path / "snapshots") == ["alive", "step-10", "step-20"]


def test_a_result_that_comes_after_that_of_a_later_step_counts() -> None:
    results: dict[str, Any] = {}
    best = BestWeights(2)
    run = mock.Mock(step=100, total_steps=200, watched="validation")
    run.progress.ends_early = ""
    for step in (60, 100, 80):
        best.on_evaluation(run, _found(step, 0.6 if step == 60 else 0.7))
    assert not run.end_after_this_step.called  # one evaluation since
    best.on_evaluation(run, _found(120, 0.6))
    assert "2 evaluations in a row" in run.end_after_this_step.call_args.args[0]
    best.on_summary(run, results)
    assert results["best_evaluation"]["step"] == 80  # the first of equal ones


def test_a_disk_that_fails_ends_the_wait_for_results_with_a_line(ours: Snapshots, tmp_path: Path) -> None:
    """It is no error of the run: the weights do not depend on it."""
    run, remote, best = mock.Mock(run_dir=tmp_path, step=10, watched="test"), RemoteEvaluation(), BestWeights(None)
    run.files_may_fail = partial(Run.files_may_fail, run)
    run.ranks.broadcast, run.reporter.evaluated = (lambda value: value), {"test": set()}
    remote.snapshots = best.snapshots = ours
    remote.has_met, end = True, math.inf
    ours.offer(10)
    reader = snapshots.follow(tmp_path)
    assert reader and remote._is_awaited(run, end)
    for broken in ("has_readers", "pending", "best", "go_back"):
        with mock.patch.object(ours, broken, side_effect=OSError(5, "Input/output error")):
            assert remote._is_awaited(run, end) == (broken in ("best", "go_back"))
            best.on_rollback(run)
        said = [call.args[0] for call in run.warn.call_args_list]
        assert said and all(line.endswith(": Input/output error") for line in said), said
        run.warn.reset_mock()
