"""Ranks whose convolutions are computed differently: named at the start, refused where bits are promised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks

pytestmark = pytest.mark.slow


def _train_unlike(folder: str, slow_rank: int) -> dict[str, Any]:
    """Runs of two ranks, one of which has its compiled convolutions disabled; what each said."""
    import os

    from hvd_cifar.runtime.environment import launched_rank

    if launched_rank() == slow_rank:
        os.environ["HVD_CIFAR_VECTORS"] = "0"
    import keras
    import numpy as np

    import hvd_cifar
    from hvd_cifar.errors import UserError
    from hvd_cifar.kernels import compiled
    from hvd_cifar.reporting import terminal
    from hvd_cifar.training import record

    told: list[str] = []
    vars(record)["complain"] = told.append
    vars(terminal)["say"] = told.append
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype(np.uint8)
    data = hvd_cifar.Dataset.from_arrays(images, np.arange(16) % 2, images, np.arange(16) % 2)

    def net(image_shape: Any, classes: int) -> Any:
        return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

    found: dict[str, Any] = {"ours": compiled.about()}
    for name, options in (("plain", {}), ("virtual", {"virtual_shards": 2, "threads_per_rank": 1})):
        course: dict[str, Any] = {"global_batch_size": 4, "max_steps": 2, "threads_per_rank": 1, **options}
        course["deterministic"] = True  # TensorFlow keeps it for the whole process
        try:
            hvd_cifar.train(net, data, run_dir=f"{folder}/{name}", eval_every=0, **course)
            found[name] = "trained"
        except UserError as refused:
            found[name] = str(refused)
    return {**found, "told": told}


def test_hosts_that_compute_differently_are_named_and_refused_where_bits_are_promised(tmp_path: Path) -> None:
    first, second = run_ranks(_train_unlike, 2, str(tmp_path), 1, fresh=True)
    if first["ours"] == "TensorFlow's":
        pytest.skip("there are no compiled convolutions here")
    assert first["plain"] == second["plain"] == "trained"
    (note,) = (line for line in first["told"] if "compute convolutions differently" in line)
    assert "compiled" in note and "TensorFlow's" in note
    assert first["virtual"] == second["virtual"]
    assert "--virtual-shards: hosts compute convolutions differently" in first["virtual"]

    recorded = json.loads((tmp_path / "plain" / "config.json").read_text())["run"]["convolutions"]
    assert "compiled" in recorded and "TensorFlow's" in recorded
