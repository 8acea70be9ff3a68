"""Objects of a user's files, which may be programs that train, and layers that draw random numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import keras
import pytest

from hvd_cifar.errors import UserError
from hvd_cifar.training import user_code
from hvd_cifar.training.work import random_layers

PROGRAM = """
import pathlib
import hvd_cifar

def build(image_shape, classes):
    return "net", image_shape, classes

try:
    hvd_cifar.{call}
except Exception:
    pass
pathlib.Path(__file__).with_name("after").touch()

def later():
    pass
"""


@pytest.mark.parametrize("call", ["train(build, epochs=5)", "evaluate('runs/mine')"])
def test_a_program_is_loaded_up_to_its_training(call: str, tmp_path: Path) -> None:
    (file := tmp_path / "program.py").write_text(PROGRAM.format(call=call))
    build = user_code.load(f"{file}:build", "--model")
    assert build((1, 2, 3), 4) == ("net", (1, 2, 3), 4)
    assert not (tmp_path / "after").exists() and not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match="there is no later in .*, which has build"):
        user_code.load(f"{file}:later", "--model")
    sys.path.remove(str(tmp_path))


def test_recurrent_layers_draw_only_with_dropout() -> None:
    for dropout, drawing in ((0.0, 0), (0.5, 1)):
        net = keras.Sequential([keras.Input((3, 2)), keras.layers.LSTM(4, dropout=dropout), keras.layers.Dropout(0.0)])
        assert len(random_layers(net)) == drawing
