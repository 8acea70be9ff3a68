"""What an evaluation or a checkpoint in the middle of a run uses, and what it leaves behind; on three real ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.small import net_with, train_on_grey


def _runs(folder: str) -> dict[str, Any]:
    """Short runs with local batch norm, and what a callback sees of each."""
    import keras

    import hvd_cifar
    from hvd_cifar.distributed import collectives
    from hvd_cifar.distributed.batch_norm import moving_statistics

    class Recorder(hvd_cifar.Callback):
        def __init__(self) -> None:
            self.statistics: dict[int, str] = {}  # this rank's after each step
            self.evaluations: dict[int, float] = {}
            self.statistics_alike: list[bool] = []  # on all ranks, at each evaluation
            self.weights = ""

        def on_step(self, run: Any) -> None:
            self.statistics[run.step] = collectives.digest(moving_statistics(run.model))

        def on_evaluation(self, run: Any, evaluation: Any) -> None:
            found = collectives.all_gather_object(collectives.digest(moving_statistics(run.model)))
            self.statistics_alike.append(len(set(found)) == 1)
            self.evaluations[run.step] = evaluation.loss

        def on_end(self, run: Any) -> None:
            self.weights = collectives.digest(run.model.trainable_variables)

    def train(name: str, ema_decay: float = 0.9, **settings: Any) -> dict[str, Any]:
        recorder, net = Recorder(), net_with(partial(keras.layers.BatchNormalization, momentum=0.5))
        settings |= {"epochs": 1, "set": {"ema_decay": ema_decay}}
        train_on_grey(f"{folder}/{name}", net, [recorder], **settings)
        return vars(recorder)

    return {
        "evaluated": train("evaluated", eval_every=2),
        "plain": train("plain"),
        "saved by time": train("saved", checkpoint_minutes=1e-6),
        "without averages": train("without", ema_decay=0, max_steps=2),
    }


Ranks = tuple[list[dict[str, Any]], Path]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """What each of three ranks saw of the runs, and the folder of these."""
    folder = tmp_path_factory.mktemp("runs")
    return run_ranks(_runs, 3, str(folder), timeout=240), folder


def test_an_evaluation_is_of_the_averaged_weights_and_puts_the_others_back(ranks: Ranks) -> None:
    root = ranks[0][0]
    evaluated = root["evaluated"]
    assert list(evaluated["evaluations"]) == ["2", "4", "6"]
    without = root["without averages"]["evaluations"]["2"]
    assert evaluated["evaluations"]["2"] != pytest.approx(without, rel=1e-6)
    assert evaluated["weights"] == root["plain"]["weights"]


def test_moving_statistics_are_averaged_before_every_evaluation(ranks: Ranks) -> None:
    for seen in ranks[0]:
        assert seen["evaluated"]["statistics_alike"] == [True] * 3
    before = {seen["evaluated"]["statistics"]["1"] for seen in ranks[0]}
    assert len(before) == 3  # each rank gathers its own


def test_a_checkpoint_by_the_clock_leaves_the_run_as_it_was(ranks: Ranks) -> None:
    """It holds averaged statistics; each rank goes on with its own."""
    for seen in ranks[0]:
        for name in ("statistics", "weights"):
            assert seen["saved by time"][name] == seen["plain"][name]
    steps = [{path.name for path in (ranks[1] / name / "checkpoints").iterdir()} for name in ("saved", "plain")]
    assert len(steps[0]) > 2 and steps[1] == {"step-6"}


def test_a_rank_without_an_example_learns_no_statistics(ranks: Ranks) -> None:
    changes = [seen["plain"]["statistics"]["6"] != seen["plain"]["statistics"]["5"] for seen in ranks[0]]
    assert changes == [True, True, False]
