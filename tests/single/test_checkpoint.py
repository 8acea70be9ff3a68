"""Saving, keeping, restoring; and refusing what cannot be right."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.models import Net
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.training import checkpoint
from hvd_cifar.training.checkpoint import KEPT, Checkpoints, State
from tests.ranks import CHECKOUT, environment


def _state(seed: int = 0, units: int = 3, averages: bool = True) -> State:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(units, name="first"), keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((2,)), *layers])
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    optimizer.apply([np.full(v.shape, 0.5 + seed, np.float32) for v in model.trainable_variables])
    return State(Net(model, []), optimizer, MovingAverage(model.trainable_variables, 0.9) if averages else None)


def _bits(state: State) -> list[bytes]:
    return [np.asarray(v.numpy()).tobytes() for v in state.variables]


def test_what_is_restored_is_what_was_saved(tmp_path: Path) -> None:
    state = _state(0)
    state.step.assign(12)
    path = Checkpoints(tmp_path, state).save()
    other = _state(1)
    assert _bits(other) != _bits(state)
    Checkpoints(tmp_path / "elsewhere", other).restore(path)
    assert _bits(other) == _bits(state)
    assert int(other.step.numpy()) == 12


def test_the_newest_five_are_kept_also_after_a_restart(tmp_path: Path) -> None:
    for steps in (range(1, 5), range(5, 9)):
        state = _state()
        checkpoints = Checkpoints(tmp_path, state)
        for step in steps:
            state.step.assign(step)
            checkpoints.save()
    kept = sorted(p.name for p in tmp_path.glob("*.index"))
    assert kept == [f"step-{step}.index" for step in range(9 - KEPT, 9)]
    assert checkpoint.find(tmp_path) == tmp_path / "step-8"


def test_a_checkpoint_is_found_by_its_path_its_folder_and_its_run(tmp_path: Path) -> None:
    state = _state()
    path = Checkpoints(tmp_path / "checkpoints", state).save()
    for place in (path, tmp_path / "checkpoints", tmp_path):
        assert checkpoint.find(place) == path
    assert checkpoint.find(tmp_path / "elsewhere") is None
    assert checkpoint.find(tmp_path / "checkpoints" / "step-99") is None


@pytest.mark.parametrize("damage", ["empty index", "half an index", "no data"])
def test_one_whose_writing_was_killed_is_passed_over(damage: str, tmp_path: Path) -> None:
    """TensorFlow writes the index last, but in place."""
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    for step in (5, 10):
        state.step.assign(step)
        checkpoints.save()
    index, (data,) = tmp_path / "step-10.index", tmp_path.glob("step-10.data-*")
    if damage == "no data":
        data.unlink()
    else:
        index.write_bytes(index.read_bytes()[: 0 if damage == "empty index" else 100])
    (tmp_path / "step-15_temp").mkdir()
    assert checkpoint.find(tmp_path) == tmp_path / "step-5"
    Checkpoints(tmp_path, _state(1)).restore(tmp_path / "step-5")
    assert not (tmp_path / "step-15_temp").exists()


def test_one_of_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    state = _state()
    state.origin.assign([7, 32, 100])
    path = Checkpoints(tmp_path, state).save()
    other = _state()
    other.origin.assign([8, 32, 90])
    with pytest.raises(UserError, match="seed was 7, is 8; training examples was 100, is 90"):
        Checkpoints(tmp_path, other).restore(path)
    for changed, told in (([7, 33, 100], "global batch was 32, is 33"), ([7, 32, 90], "training examples was 100")):
        other.origin.assign(changed)
        with pytest.raises(UserError, match=told):
            Checkpoints(tmp_path, other).restore(path)


def test_the_newest_one_is_found_without_tensorflow_s_list_of_them(tmp_path: Path) -> None:
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    for step in (9, 10, 11):
        state.step.assign(step)
        checkpoints.save()
    for file in tmp_path.glob("step-11.*"):
        file.unlink()  # what a user does with a damaged one; the list still names it
    assert checkpoint.find(tmp_path) == tmp_path / "step-10"
    (tmp_path / "checkpoint").unlink()
    assert checkpoint.find(tmp_path) == tmp_path / "step-10"


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    state = _state()
    path = Checkpoints(tmp_path, state).save()
    data = Path(f"{path}.data-00000-of-00001")
    data.write_bytes(data.read_bytes()[:20])
    with pytest.raises(UserError, match="cannot read the checkpoint"):
        Checkpoints(tmp_path / "elsewhere", _state()).restore(path)


@pytest.mark.parametrize("other", [_state(units=4), _state(averages=False)], ids=["other shape", "no averages"])
def test_a_checkpoint_of_another_model_is_refused(other: State, tmp_path: Path) -> None:
    path = Checkpoints(tmp_path, _state()).save()
    with pytest.raises(UserError, match="the settings it was made with"):
        Checkpoints(tmp_path / "elsewhere", other).restore(path)


@pytest.mark.parametrize("units, partial", [(4, False), (4, True), (3, False)])
def test_what_does_not_fit_is_said_once(units: int, partial: bool, tmp_path: Path) -> None:
    """TensorFlow lists it again as the process ends, a line a variable: other shapes, or averages too many."""
    path = Checkpoints(tmp_path, _state()).save()
    code = (
        "import sys\n"
        "from hvd_cifar.errors import UserError\n"
        "from hvd_cifar.training.checkpoint import restore\n"
        "from tests.single.test_checkpoint import _state\n"
        "def main():\n"
        f"    state = _state(1, {units}, averages=False)\n"
        f"    try: restore(state.trackable, {str(path)!r}, partial={partial})\n"
        "    except UserError as error: print(error, file=sys.stderr)\n"
        "main()"
    )
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), cwd=CHECKOUT)
    assert done.stderr.splitlines()[-1].startswith(f"cannot read the checkpoint {path}")


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    state = _state()
    checkpoints = Checkpoints(tmp_path, state)
    checkpoints.save()
    before = sorted(tmp_path.iterdir())
    state.net.model.get_layer("first").kernel.assign(np.full((2, 3), np.nan))
    state.step.assign(1)
    with pytest.raises(TrainingError, match="first/kernel is not finite after step 1"):
        checkpoints.save()
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system takes root")
def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.system(f"mount -t tmpfs -o size=200k tmpfs '{disk}' 2>/dev/null") != 0:
        pytest.skip("no file system can be mounted here")
    try:
        state = _state()
        checkpoints = Checkpoints(disk / "checkpoints", state)
        first = checkpoints.save()
        (disk / "filler").write_bytes(b"0" * (shutil.disk_usage(disk).free - 4096))
        state.step.assign(1)
        with pytest.raises(UserError, match="earlier checkpoints are kept"):
            checkpoints.save()
        (disk / "filler").unlink()
        other = _state(1)
        Checkpoints(disk / "elsewhere", other).restore(first)
        assert int(other.step.numpy()) == 0
    finally:
        os.system(f"umount '{disk}'")
