"""Saving, keeping, restoring; and refusing what cannot be right."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.training import checkpoint
from hvd_cifar.training.checkpoint import GONE, KEPT, Checkpoints, damage, find, listed, read, restore, values_of, write
from hvd_cifar.training.state import TrainState
from tests.run_dirs import full_disk


def _state(seed: int = 0, units: int = 3, averages: bool = True) -> TrainState:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(units, name="first"), keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    optimizer.apply([np.full(v.shape, 0.5 + seed, np.float32) for v in model.trainable_variables])
    state = TrainState(model, optimizer)
    if averages:
        state.add("averages", MovingAverage(model.trainable_variables, 0.9).variables, core=True)
    return state


def _bits(state: TrainState) -> list[bytes]:
    return [np.asarray(v.numpy()).tobytes() for v in state.variables]


def test_the_newest_five_and_linked_ones_are_kept_also_after_a_restart(tmp_path: Path) -> None:
    (folder := tmp_path / "checkpoints").mkdir()
    (tmp_path / "best").symlink_to("checkpoints/step-2")
    (tmp_path / "late").symlink_to("checkpoints/step-9")
    (folder / "step-9").mkdir()  # a damaged one
    for steps in (range(1, 5), range(5, 9)):
        state = _state()
        checkpoints = Checkpoints(folder, state)
        for step in steps:
            state.step.assign(step)
            checkpoints.save()
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{step}" for step in (2, *range(9 - KEPT, 9))]
    assert find(tmp_path) == folder / "step-8" and find(tmp_path / "best") == tmp_path / "best"


def test_a_checkpoint_is_found_by_its_path_its_folder_and_its_run(tmp_path: Path) -> None:
    state = _state()
    (tmp_path / "checkpoints").mkdir()
    path = Checkpoints(tmp_path / "checkpoints", state).save()
    for place in (path, tmp_path / "checkpoints", tmp_path):
        assert find(place) == path
    assert find(tmp_path / "elsewhere") is None
    assert find(tmp_path / "checkpoints" / "step-99") is None


def _flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_every_damage_is_found_before_a_value_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each bit of a value counts; of the rest of the archive only what leads to them."""
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    for step in (5, 10):
        state.step.assign(step)
        checkpoints.save()
    newest = tmp_path / "step-10"
    (file,) = newest.iterdir()
    whole = file.read_bytes()
    assert find(tmp_path) == newest
    capfd.readouterr()
    for damaged in (None, b"", whole[:-9], whole[:50]):
        file.unlink() if damaged is None else file.write_bytes(damaged)
        assert find(tmp_path) == tmp_path / "step-5"
    (said, *_) = capfd.readouterr().err.splitlines()
    assert f"warning: damaged checkpoint {newest} ({file.name}" in said and "step-5 is taken" in said
    expected = {name: value.tobytes() for name, value in values_of(state).items()}
    noticed = 0
    for at in range(0, len(whole), 37):
        file.write_bytes(whole)
        _flip(file, at)
        if damage(newest) is None:
            assert {name: value.tobytes() for name, value in read(newest).items()} == expected, at
        else:
            noticed += 1
    assert noticed > 0.5 * len(whole) / 37
    file.write_bytes(whole)
    _flip(file, whole.index(expected["state/model/0"]))
    with pytest.raises(UserError, match=r"state.npz is not what was written\), and no whole one in .*step-10"):
        find(newest)


# A save is killed before its values are on disk, before its folder has its name, and while the oldest is removed.
@pytest.mark.parametrize(("place", "name"), [(checkpoint, "sync"), (os, "replace"), (shutil, "rmtree")])
def test_a_kill_while_writing_costs_no_older_one(place: Any, name: str, tmp_path: Path) -> None:
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    for step in range(1, KEPT + 1):
        state.step.assign(step)
        checkpoints.save()
    state.step.assign(KEPT + 1)
    if (child := os.fork()) == 0:
        try:
            setattr(place, name, lambda *given, **named: os.kill(os.getpid(), signal.SIGKILL))
            checkpoints.save()
        finally:
            os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(tmp_path.glob(".*"))
    steps = range(KEPT + 1, 1, -1) if name == "rmtree" else range(KEPT, 0, -1)
    assert [path.name for path in listed(tmp_path)] == [f"step-{step}" for step in steps]
    assert [damage(path) for path in listed(tmp_path)] == [None] * KEPT
    Checkpoints(tmp_path, state)
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, _state()).save()
    for other in (_state(units=4), _state(averages=False)):
        with pytest.raises(UserError, match="the settings it was made with"):
            restore(other, path)
    with pytest.raises(UserError, match=r"/first/kernel is \(2, 3\) there and \(2, 4\) in this net;"):
        restore(_state(units=4), path, partial=True)


def test_a_checkpoint_of_a_run_that_could_go_back_is_read(tmp_path: Path) -> None:
    state = _state()
    older = {**values_of(state), GONE: np.array(2), "added/rate_factor/0": np.array(0.5)}
    restore(other := _state(1), write(tmp_path, 3, older))
    assert _bits(other) == _bits(state)


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """An infinite constant, such as the mask of an attention layer, is no diverged run."""
    state = _state()
    state.model.get_layer("norm").moving_mean.assign(np.full(3, -np.inf))
    checkpoints = Checkpoints(tmp_path, state)
    checkpoints.save()
    before = sorted(tmp_path.iterdir())
    state.step.assign(1)
    for layer, name, value in (("norm", "moving_variance", np.inf), ("first", "bias", np.nan)):
        getattr(state.model.get_layer(layer), name).assign(np.full(3, value))
        with pytest.raises(TrainingError, match=f"{layer}/{name} is not finite after step 1"):
            checkpoints.save()
        getattr(state.model.get_layer(layer), name).assign(np.ones(3))
    assert sorted(tmp_path.iterdir()) == before


def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    first = checkpoints.save()
    state.step.assign(1)
    before = sorted(tmp_path.rglob("*"))
    told = "step 1 in .*: File too large; earlier checkpoints are kept"
    with full_disk(400), pytest.raises(UserError, match=told):
        checkpoints.save()
    assert sorted(tmp_path.rglob("*")) == before
    other = _state(1)
    restore(other, first)
    assert int(other.step.numpy()) == 0
