"""The curves of a real run on two ranks in TensorBoard: those of its other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from benchmarks import runs
from tests.options import FEW
from tests.ranks import command, run_ranks

STEPS, EVERY = 11, 5


def test_tensorboard_shows_what_the_run_records(tmp_path: Path) -> None:
    words = ["train", "--model", "tutorial", "--dataset", FEW, "--run-dir", tmp_path / "run", "--batch-size", 16]
    ranks = run_ranks(command, 2, [*words, "--log-every", EVERY, "--eval-every", 0, "--max-steps", STEPS])
    assert [rank["code"] for rank in ranks] == [0, 0], ranks
    events = runs.events(tmp_path / "run")
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()

    def curve(tag: str) -> dict[int, float]:
        return {event.step: make_ndarray(event.tensor_proto).item() for event in found.Tensors(tag)}

    def recorded(kind: str, name: str) -> Any:
        return pytest.approx({e["step"]: e[name] for e in events if e["event"] == kind}, rel=1e-5)

    total = curve("total_loss")
    assert list(total) == [5, 10, 11] and total == recorded("train", "loss")
    weights, entropies = curve("weight_loss"), curve("cross_entropy")
    assert total == pytest.approx({step: entropies[step] + weights[step] for step in total}, rel=1e-5)
    assert all(weights.values())
    for name in ("learning_rate", "images_per_second"):
        assert curve(name) == recorded("train", name)
    assert curve("small.py:few/test_accuracy") == recorded("eval", "test_accuracy")
    (times,) = (event for event in events if event["event"] == "ranks")
    for name in ("compute_seconds", "wait_seconds"):
        assert [curve(f"{name}/rank_{rank}")[STEPS] for rank in (0, 1)] == pytest.approx(times[name], rel=1e-5)
