"""What ranks choose where there is a GPU: two ranks are told of one each, and TensorFlow computes on the CPU."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import runs
from tests.ranks import error_of, run_ranks

pytestmark = pytest.mark.slow

NVIDIA_SMI = """#!/bin/sh
for n in 0 1; do echo "GPU $n: Pretended (UUID: GPU-$n)"; done
"""
# As `fast` does, it takes bfloat16 where there is a GPU.
NET = """
import dataclasses
from tests import small

def build(image_shape, classes):
    net, recipe = small.build(image_shape, classes)
    return net, dataclasses.replace(recipe, precision=None)
"""


def commands_on_pretended_gpus(commands: list[list[str]]) -> dict[str, Any]:
    """Run commands; what this rank told TensorFlow of its GPU, what it printed, and which kernels its layers took."""
    import tensorflow as tf

    from hvd_cifar.cli import main

    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{number}", device_type="GPU") for number in (0, 1)]
    visible: list[Any] = []
    grows: list[str] = []
    of = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda kind=None: gpus if kind == "GPU" else of(kind)
    tf.config.list_logical_devices = lambda kind=None: visible
    tf.config.set_visible_devices = lambda gpu, kind: visible.append(gpu)
    tf.config.get_visible_devices = lambda kind: visible
    tf.config.experimental.set_memory_growth = lambda gpu, on: grows.append(f"{gpu.name} {on}")
    tf.config.experimental.get_device_details = lambda gpu: {"compute_capability": (9, 0), "device_name": "Pretended"}
    printed = io.StringIO()
    for words in commands:
        with contextlib.redirect_stdout(printed), pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 0, words
    return {"visible": [gpu.name for gpu in visible], "grows": grows, "printed": printed.getvalue()}


def start_where_tensorflow_finds_no_gpu() -> str:
    """The error of a start with Horovod on NCCL, whose TensorFlow finds no GPU."""
    import horovod.tensorflow as hvd

    from hvd_cifar.runtime import world

    vars(hvd)["nccl_built"] = lambda: 23203
    return error_of(world.start)


@pytest.fixture(scope="module")
def done(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What both ranks tell, and the folder of the results."""
    folder = tmp_path_factory.mktemp("gpus")
    data = ["--dataset", "synthetic", "--data-dir", str(embedded)]
    (folder / "net.py").write_text(NET)
    train = ["train", "--model", f"{folder}/net.py:build", *data, "--run-dir", str(folder / "run"), "--max-steps", "6"]
    commands = [
        ["doctor-job"],
        [*train, "--batch-size", "16", "--log-every", "2", "--overlap", "on"],
        ["evaluate", "--run-dir", str(folder / "run")],
    ]
    env = {"PATH": _path(folder)}
    return run_ranks(commands_on_pretended_gpus, 2, commands, env=env, timeout=900), folder


def _path(folder: Path) -> str:
    """A search path whose nvidia-smi lists two GPUs."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    return os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])


def test_no_run_trains_on_the_cpu_beside_gpus_that_tensorflow_does_not_find(tmp_path: Path) -> None:
    env = {"PATH": _path(tmp_path)}
    for error in run_ranks(start_where_tensorflow_finds_no_gpu, 2, env=env):
        assert "nvidia-smi lists 2 GPUs, but TensorFlow finds none" in error
    on_cpu = {**env, "CUDA_VISIBLE_DEVICES": ""}
    assert run_ranks(start_where_tensorflow_finds_no_gpu, 2, env=on_cpu) == ["accepted"] * 2


def test_each_rank_trains_on_its_gpu_with_only_the_memory_that_it_needs(done: Any) -> None:
    ranks, folder = done
    for number, rank in enumerate(ranks):
        assert rank["visible"] == [f"/physical_device:GPU:{number}"]
        assert rank["grows"] == [f"/physical_device:GPU:{number} True"]
    config = json.loads((folder / "run" / "config.json").read_text())
    facts = config["run"]
    assert (facts["device"], facts["convolutions"], facts["threads"]) == ("/GPU:0", "TensorFlow's", 0)
    assert config["precision"] == "mixed_bfloat16"
    assert list(runs.losses(folder / "run")) == [2, 4, 6]
    assert "2 ranks, one GPU each" in ranks[0]["printed"] and "test accuracy" in ranks[0]["printed"]
