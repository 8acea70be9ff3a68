"""Ranks that serve all tests (`tests.ranks`): what one function changes, the next does not find; an error ends them."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RanksFailed, run_ranks


def _change_everything(folder: str) -> int:
    import keras
    import numpy as np

    from hvd_cifar.reporting import terminal

    Path(folder, "own_module.py").write_text(f"PLACE = {folder!r}")
    os.environ["HVD_CIFAR_OF_A_TEST"] = "1"
    os.chdir(folder)
    sys.path.insert(0, folder)
    importlib.import_module("own_module")
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("mixed_bfloat16")
    keras.layers.Dense(1)
    np.random.seed(5)
    vars(terminal)["say"] = None
    return os.getpid()


def _state() -> dict[str, Any]:
    import keras
    import numpy as np

    from hvd_cifar.reporting import terminal

    return {
        "variable": os.environ.get("HVD_CIFAR_OF_A_TEST"),
        "folder": os.getcwd(),
        "modules": [name for name in sys.modules if name == "own_module"],
        "types": [keras.config.floatx(), keras.config.dtype_policy().name],
        "name": keras.layers.Dense(1).name,
        "drawn": np.random.random(),
        "say": terminal.say is not None,
        "pid": os.getpid(),
    }


def test_a_function_finds_its_process_as_at_a_start(tmp_path: Path) -> None:
    before = run_ranks(_state, 2)
    changed = run_ranks(_change_everything, 2, str(tmp_path))
    assert changed == [rank["pid"] for rank in before]  # the same processes
    assert run_ranks(_state, 2) == before
    assert before[0]["drawn"] != before[1]["drawn"] and before[0]["say"]
    assert before[0]["types"] == ["float32", "float32"] and before[0]["name"] == "dense"


def _fail_on_rank_1() -> float:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    if hvd.rank() == 1:
        raise ValueError("no value of rank 1")
    return float(hvd.allreduce(tf.zeros(1))[0])


def _wait() -> None:
    time.sleep(60)


@pytest.mark.slow  # ranks start anew after it
def test_an_error_of_a_rank_ends_them_and_others_take_their_place() -> None:
    pids = {rank["pid"] for rank in run_ranks(_state, 2)}
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_fail_on_rank_1, 2)
    assert failed.value.returncode == 1 and "ValueError: no value of rank 1" in failed.value.logs[1]
    assert not pids & {rank["pid"] for rank in run_ranks(_state, 2)}
    with pytest.raises(RanksFailed, match=r"no end after 0\.5 s") as failed:
        run_ranks(_wait, 1, timeout=0.5)
    assert failed.value.returncode is None
