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
from tests.ranks import run_command

NETS = """
import horovod.tensorflow as hvd
import keras
from keras import layers as L, ops

def _net(shape, *layers):
    return keras.Sequential([keras.Input(shape), L.Flatten(), *layers])

def cast(shape, c):
    return _net(shape, L.Dense(c), L.Lambda(lambda x: ops.cast(ops.cast(x, "int32"), "float32")))

def deeper(shape, c):
    return _net(shape, L.Dense(c), *([L.Dense(c)] if hvd.rank() else []))

def other_activation(shape, c):
    return _net(shape, L.Dense(8, "relu" if hvd.rank() else "tanh", name="hidden"), L.Dense(c))

def other_source(shape, c):
    images = keras.Input(shape)
    parts = [L.Flatten()(images), L.Flatten()(images[:, ::-1])]
    return keras.Model(images, L.Dense(c)(L.Concatenate()(parts[::-1] if hvd.rank() else parts)))

def fixed(shape, c):
    return keras.Sequential([keras.Input(batch_shape=(24, *shape)), L.Flatten(), L.Dense(c)])

class Remembers(L.Layer):
    stateful = True

def stateful(shape, c):
    return _net(shape, Remembers(name="memory"), L.Dense(c))
"""


def _train(n: int, folder: Path, net: str, code: int = 0) -> list[dict[str, Any]]:
    (folder / "nets.py").write_text(NETS)
    words = ["--model", f"{folder}/nets.py:{net}", "--dataset", FEW, "--run-dir", folder / "run", "--max-steps", 2]
    return run_command(n, "train", "--global-batch-size", 24, *words, code=code)


# A net, the ranks that build it, and the line that refuses it.
REFUSED = [
    ("cast", 1, "no trainable variable has a gradient ("),
    ("fixed", 1, "its keras.Input has a batch of 24; batches have several sizes"),
    ("stateful", 1, "its layer memory keeps a state from batch to batch"),
    ("deeper", 2, "rank 1 has built another net than rank 0: dense_1 (Dense) differs"),
    ("other_activation", 2, "rank 1 has built another net than rank 0: hidden (Dense) differs"),
    ("other_source", 2, "rank 1 has built another net than rank 0: functional (Functional) differs"),
]


@pytest.mark.parametrize(("net", "n", "why"), REFUSED, ids=[net for net, *_ in REFUSED])
def test_a_net_that_no_run_may_begin_with_is_refused(net: str, n: int, why: str, tmp_path: Path) -> None:
    (line,) = (line for rank in _train(n, tmp_path, net, code=2) for line in rank["errors"])
    assert why in line
    assert not listed(tmp_path / "run")


def test_keras_2_is_refused_in_one_line() -> None:
    words = [sys.executable, "-m", "hvd_cifar", "train"]
    ended = subprocess.run(words, env={**os.environ, "TF_USE_LEGACY_KERAS": "1"}, capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "TF_USE_LEGACY_KERAS asks TensorFlow for Keras 2" in ended.stderr
