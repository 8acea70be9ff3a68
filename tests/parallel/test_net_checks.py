"""Nets that no run may begin with: without gradients, other ones on other ranks, with a state that nothing keeps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar.training.checkpoint import listed
from tests.options import FEW
from tests.ranks import command, run_ranks

NETS = """
import horovod.tensorflow as hvd
import keras
from keras import layers as L, ops

def _net(shape, *layers):
    return keras.Sequential([keras.Input(shape), L.Flatten(), *layers])

def cast(shape, c):
    return _net(shape, L.Dense(c), L.Lambda(lambda x: ops.cast(ops.cast(x, "int32"), "float32")))

def partly(shape, c):
    images = keras.Input(shape)
    flat = L.Flatten()(images)
    useless = ops.cast(L.Dense(c, name="useless")(flat) > 1e9, "float32")
    return keras.Model(images, L.Dense(c)(flat) + useless)

def deeper(shape, c):
    return _net(shape, L.Dense(c), *([L.Dense(c)] if hvd.rank() else []))

def other_activation(shape, c):
    return _net(shape, L.Dense(8, "relu" if hvd.rank() else "tanh", name="hidden"), L.Dense(c))

def other_function(shape, c):
    return _net(shape, L.Lambda((lambda x: x * 2) if hvd.rank() else (lambda x: x * x), name="times"), L.Dense(c))

def other_source(shape, c):
    images = keras.Input(shape)
    a, b = L.Flatten(name="a")(images), L.Flatten(name="b")(images[:, ::-1])
    return keras.Model(images, L.Dense(c, name="top")(b if hvd.rank() else a))

def fixed(shape, c):
    return keras.Sequential([keras.Input(batch_shape=(24, *shape)), L.Flatten(), L.Dense(c)])

class Remembers(L.Layer):
    stateful = True

def stateful(shape, c):
    return _net(shape, Remembers(name="memory"), L.Dense(c))

def alike(shape, c):
    return _net(shape, L.Lambda(lambda x: x * 2), L.Dropout(0.1), L.Dense(c))
"""


def _train(n: int, folder: Path, net: str) -> list[dict[str, Any]]:
    (folder / "nets.py").write_text(NETS)
    words = ["--model", f"{folder}/nets.py:{net}", "--dataset", FEW, "--run-dir", folder / "run", "--max-steps", 2]
    return run_ranks(command, n, ["train", "--global-batch-size", 24, *words])


def test_a_net_without_gradients_is_refused(tmp_path: Path) -> None:
    (rank,) = _train(1, tmp_path, "cast")
    (line,) = rank["errors"]
    assert rank["code"] == 2 and "nets.py:cast: no trainable variable has a gradient (" in line and "kernel" in line
    assert not listed(tmp_path / "run")


def test_variables_without_a_gradient_are_named(tmp_path: Path) -> None:
    (rank,) = _train(1, tmp_path, "partly")
    (note,) = (line for line in rank["said"] if "does not depend on" in line)
    assert rank["code"] == 0 and "useless/kernel, useless/bias" in note


@pytest.mark.parametrize(
    ("net", "layer"),
    [
        ("deeper", "dense_1 (Dense)"),
        ("other_activation", "hidden (Dense)"),
        ("other_function", "times (Lambda)"),
        ("other_source", "top (Dense)"),
    ],
)
def test_another_net_on_another_rank_is_refused(net: str, layer: str, tmp_path: Path) -> None:
    ranks = _train(2, tmp_path, net)
    assert [rank["code"] for rank in ranks] == [2, 2]
    (line,) = (line for rank in ranks for line in rank["errors"])
    assert f"rank 1 has built another net than rank 0: {layer} differs" in line


def test_the_same_net_is_no_other(tmp_path: Path) -> None:
    assert [rank["code"] for rank in _train(2, tmp_path, "alike")] == [0, 0]


@pytest.mark.parametrize(
    ("net", "why"),
    [
        ("fixed", "its keras.Input has a batch of 24; batches have several sizes"),
        ("stateful", "its layer memory keeps a state from batch to batch"),
    ],
)
def test_a_net_for_one_batch_only_is_refused(net: str, why: str, tmp_path: Path) -> None:
    (rank,) = _train(1, tmp_path, net)
    (line,) = rank["errors"]
    assert rank["code"] == 2 and f"nets.py:{net}: {why}" in line


def _without_bfloat16(folder: str) -> Any:
    """In a run's first lines on a processor without instructions for bfloat16."""
    from unittest import mock

    from hvd_cifar.runtime import devices

    with mock.patch.object(devices, "multiplies_bfloat16", lambda cpuinfo: False):
        words = ["--model", f"{folder}/nets.py:alike", "--dataset", FEW, "--run-dir", f"{folder}/run"]
        return command(["train", *words, "--precision", "mixed_bfloat16", "--max-steps", 1])


def test_slow_bfloat16_is_told(tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    (rank,) = run_ranks(_without_bfloat16, 1, str(tmp_path))
    assert rank["code"] == 0 and sum("no instructions for it" in line for line in rank["said"]) == 1


def test_keras_2_is_refused_in_one_line() -> None:
    words = [sys.executable, "-m", "hvd_cifar", "train"]
    ended = subprocess.run(words, env={**os.environ, "TF_USE_LEGACY_KERAS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "TF_USE_LEGACY_KERAS asks TensorFlow for Keras 2" in ended.stderr
