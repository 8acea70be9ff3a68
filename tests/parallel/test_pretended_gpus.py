"""What ranks choose where there is a GPU: two ranks are told of one each, and TensorFlow computes on the CPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import error_of, run_all

pytestmark = pytest.mark.slow

NVIDIA_SMI = """#!/bin/sh
for n in 0 1; do echo "GPU $n: Pretended (UUID: GPU-$n)"; done
"""


def start_where_tensorflow_finds_no_gpu() -> str:
    """The error of a start with Horovod on NCCL, whose TensorFlow finds no GPU."""
    import horovod.tensorflow as hvd

    from hvd_cifar.runtime import world

    vars(hvd)["nccl_built"] = lambda: 23203
    return error_of(world.start)


def start_on_pretended_gpus() -> dict[str, Any]:
    """What this rank told TensorFlow of its GPU, and what it says of itself."""
    import tensorflow as tf

    from hvd_cifar.runtime import world

    gpus = [SimpleNamespace(name=f"/physical_device:GPU:{number}", device_type="GPU") for number in (0, 1)]
    told: list[str] = []
    of = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda kind=None: gpus if kind == "GPU" else of(kind)
    tf.config.set_visible_devices = lambda gpu, kind: told.append(gpu.name)
    tf.config.get_visible_devices = lambda kind: gpus[:1]
    tf.config.experimental.set_memory_growth = lambda gpu, on: told.append(f"{gpu.name} grows: {on}")
    tf.config.experimental.get_device_details = lambda gpu: {"compute_capability": (9, 0), "device_name": "Pretended"}
    with world.session() as here:
        own = here.ranks[here.rank]
        return {"told": told, "facts": [here.device, here.threads, own.precision, own.kernels], "said": here.describe()}


def test_each_rank_takes_its_gpu_with_only_the_memory_that_it_needs(tmp_path: Path) -> None:
    """And no run trains on the CPU beside GPUs that TensorFlow does not find."""
    program = tmp_path / "nvidia-smi"
    program.write_text(NVIDIA_SMI)
    program.chmod(0o755)
    env = {"PATH": os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])}
    functions = {"none": start_where_tensorflow_finds_no_gpu, "gpus": start_on_pretended_gpus}
    found = run_all(functions, 2, env=env)
    assert all("nvidia-smi lists 2 GPUs, but TensorFlow finds none" in error for error in found["none"])
    for number, rank in enumerate(found["gpus"]):
        name = f"/physical_device:GPU:{number}"
        assert rank["told"] == [name, f"{name} grows: True"]
        assert rank["facts"] == ["/GPU:0", 0, "mixed_bfloat16", "TensorFlow's"]
        assert "2 ranks, one GPU each" in rank["said"]
