"""Evaluations by other ranks: asked for, taken, answered; the best weights; and what a disk that fails does to them."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hvd_cifar.extensions import remote_evaluation
from hvd_cifar.extensions.best_weights import BestWeights
from hvd_cifar.extensions.remote_evaluation import RemoteEvaluation, answer, asked_for, newest_without_result
from hvd_cifar.training.callbacks import Run
from hvd_cifar.training.checkpoint import damage, write
from hvd_cifar.training.evaluate import Evaluation


def _found(step: int, accuracy: float = 0.5) -> Evaluation:
    return Evaluation(accuracy, 1.5, 100, accuracy, 1, step=step, part="validation")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run of one rank, whose checkpoints are empty."""
    (tmp_path / "checkpoints").mkdir()
    made: Any = mock.Mock(run_dir=tmp_path, step=0, total_steps=500, watched="validation", evaluation_is_due=True)
    made.files_may_fail = partial(Run.files_may_fail, made)
    made.progress.ends_early, made.progress.stop_requested = "", False
    made.progress.flags, made.progress.own_flags = {}, {}
    made.ranks.broadcast_object, made.ranks.on_root = (lambda value: value), (lambda function: function())
    made.reporter.evaluated, made.plan.steps_per_epoch = defaultdict(set), 10
    made.save = lambda: write(tmp_path / "checkpoints", made.step, {})
    return made


def _ask(remote: RemoteEvaluation, run: Any, *steps: int) -> None:
    for run.step in steps:
        remote._ask(run)


def _missing(run: Any) -> list[int]:
    return [call.args[0] for call in run.reporter.missing.call_args_list]


def test_the_newest_one_is_taken_and_those_before_it_are_told(run: Any) -> None:
    remote, place = RemoteEvaluation(), run.run_dir
    assert newest_without_result(place) is None
    _ask(remote, run, 10, 20)
    assert newest_without_result(place) == 20
    _ask(remote, run, 30)  # while 20 is evaluated
    answer(place, _found(20))
    assert newest_without_result(place) == 30
    remote._look(run)
    assert remote.results == [_found(20)] and run.progress.own_flags == {"news": 1.0}
    remote._report(run)
    assert _missing(run) == [10] and list(asked_for(place)) == [30] and run.progress.own_flags == {"news": 0.0}
    run.tell.assert_called_once_with("on_evaluation", _found(20))
    answer(place, _found(30, math.nan))
    assert newest_without_result(place) is None and not remote._is_awaited(run, math.inf)


def test_a_run_that_goes_back_drops_what_comes_from_later_steps(run: Any) -> None:
    remote = RemoteEvaluation()
    _ask(remote, run, 10, 20, 30)
    answer(run.run_dir, _found(20))
    remote._look(run)
    run.step = 15
    remote.on_start(run)
    answer(run.run_dir, _found(30))
    assert list(asked_for(run.run_dir)) == [10] and remote.results == [] and newest_without_result(run.run_dir) == 10
    (run.run_dir / "checkpoints" / "step-10" / "state.npz").unlink()
    (run.run_dir / "checkpoints" / "step-10").rmdir()  # five newer ones are there
    assert newest_without_result(run.run_dir) is None


def test_a_link_names_the_best_checkpoint_which_is_found_again(run: Any) -> None:
    best = BestWeights(None)
    for run.step, accuracy in ((10, 0.4), (20, 0.6), (30, 0.5)):
        best.on_evaluation(run, _found(run.step, accuracy))
    link = run.run_dir / "best"
    assert link.resolve() == run.run_dir / "checkpoints" / "step-20" and damage(link) is None
    best.on_evaluation(run, _found(25, 0.9))  # of a checkpoint that is gone
    assert link.resolve().name == "step-20"
    assert "the best weights, of step 25, are not kept: No such file" in run.warn.call_args.args[0]
    (again := BestWeights(None)).on_start(run)
    assert again.best == _found(20, 0.6)
    run.step = 15
    again.on_start(run)
    assert again.best is None


def test_a_result_that_comes_after_that_of_a_later_step_counts(run: Any) -> None:
    results: dict[str, Any] = {}
    best, run.step = BestWeights(2), 130
    for step in (60, 100, 80):
        best.on_evaluation(run, _found(step, 0.6 if step == 60 else 0.7))
    assert not run.end_after_this_step.called  # one evaluation since
    best.on_evaluation(run, _found(120, 0.6))
    assert "2 evaluations in a row" in run.end_after_this_step.call_args.args[0]
    best.on_summary(run, results)
    assert results["best_evaluation"]["step"] == 80  # the first of equal ones


def test_a_disk_that_fails_ends_the_wait_for_results_with_a_line(run: Any) -> None:
    """It is no error of the run: the weights do not depend on it."""
    remote = RemoteEvaluation()
    _ask(remote, run, 10)
    assert remote._is_awaited(run, math.inf) and not remote._is_awaited(run, 0.0)
    remote.began -= remote_evaluation.SECONDS_TO_COME
    assert not remote._is_awaited(run, math.inf)  # nobody evaluates
    remote.began = math.inf
    with mock.patch.object(remote_evaluation, "asked_for", side_effect=OSError(5, "Input/output error")):
        assert not remote._is_awaited(run, math.inf)
        remote.on_start(run)
    said = [call.args[0] for call in run.warn.call_args_list]
    assert len(said) == 2 and all(line.endswith(": Input/output error") for line in said), said
