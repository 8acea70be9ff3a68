"""Ranks that round differently: by their thread counts, which take rank 0's weights; or by their convolutions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.options import FEW, SMALL_NET
from tests.ranks import error_of, run_ranks

pytestmark = pytest.mark.slow

# Optimizer, options, and megabytes that ranks take from rank 0 in each step.
CASES: list[tuple[str, dict[str, Any], float | None]] = [
    ("muon", {}, 2.4),  # the weights
    ("sgd", {"clip_norm": 0.01}, 4.8),  # and the velocities
    ("sgd", {}, None),
]


def _train(folder: str) -> list[Any]:
    """Of each case whether the ranks are the same at the end, and the lines on unlike ranks."""
    import keras
    import numpy as np

    import hvd_cifar
    from hvd_cifar.optim.muon import Muon
    from hvd_cifar.reporting import terminal
    from hvd_cifar.runtime.environment import launched_rank

    optimizers: dict[str, Any] = {"muon": Muon, "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9)}

    def with_optimizer(name: str) -> Any:
        def build(image_shape: tuple[int, int, int], classes: int) -> Any:
            images = keras.Input(image_shape)
            x = keras.layers.Conv2D(256, 3, strides=2)(images)
            # 589,824 values, which TensorFlow divides among its threads.
            x = keras.layers.Conv2D(256, 3, use_bias=False)(keras.layers.ReLU()(x))
            x = keras.layers.Dense(classes)(keras.layers.Flatten()(keras.layers.ReLU()(x)))
            return keras.Model(images, x), hvd_cifar.Recipe(optimizer=optimizers[name], lookahead=True)

        return build

    told: list[str] = []
    vars(terminal)["say"] = told.append
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype(np.uint8)
    data = hvd_cifar.Dataset.from_arrays(images, np.arange(16) % 2, images, np.arange(16) % 2)
    common: dict[str, Any] = {"global_batch_size": 8, "max_steps": 6, "check_sync_every": 1, "eval_every": 0}
    common |= {"learning_rate": 0.1, "threads_per_rank": (1, 8)[launched_rank() or 0], "epochs": 3}
    found = []
    for number, (name, options, _) in enumerate(CASES):
        told.clear()
        settings = {**common, **options, "run_dir": f"{folder}/{number}", "set": {"warmup_epochs": 0}}
        summary = hvd_cifar.train(with_optimizer(name), data, **settings)
        found.append([summary["replicas_identical"], [line for line in told if line.startswith("unlike ranks")]])
    return found


def test_unlike_ranks_keep_the_same_weights(tmp_path: Path) -> None:
    for (*_, megabytes), first, second in zip(CASES, *run_ranks(_train, 2, str(tmp_path), fresh=True), strict=True):
        assert first[0] is second[0] is True and not second[1]
        if megabytes is None:
            assert not first[1]
        else:
            (line,) = first[1]
            assert f"so all take rank 0's ({megabytes} MB a step): 1 thread of " in line and "; 8 threads of " in line


def _train_without_compiled(folder: str, slow_rank: int) -> dict[str, Any]:
    """Runs of two ranks, one of which has its compiled convolutions disabled; what each said."""
    import os

    from hvd_cifar.runtime.environment import launched_rank

    if launched_rank() == slow_rank:
        os.environ["HVD_CIFAR_VECTORS"] = "0"
    import hvd_cifar
    from hvd_cifar.kernels import compiled
    from hvd_cifar.reporting import terminal
    from hvd_cifar.training import record

    told: list[str] = []
    vars(record)["complain"] = told.append
    vars(terminal)["say"] = told.append
    found: dict[str, Any] = {"ours": compiled.about()}
    for name, options in (("plain", {}), ("virtual", {"virtual_shards": 2, "threads_per_rank": 1})):
        course: dict[str, Any] = {"global_batch_size": 4, "max_steps": 2, "threads_per_rank": 1, **options}
        course["deterministic"] = True  # TensorFlow keeps it for the whole process
        found[name] = error_of(hvd_cifar.train, SMALL_NET, FEW, run_dir=f"{folder}/{name}", eval_every=0, **course)
    return {**found, "told": told}


def test_hosts_that_compute_differently_are_named_and_refused_where_bits_are_promised(tmp_path: Path) -> None:
    first, second = run_ranks(_train_without_compiled, 2, str(tmp_path), 1, fresh=True)
    if first["ours"] == "TensorFlow's":
        pytest.skip("there are no compiled convolutions here")
    assert first["plain"] == second["plain"] == "accepted"
    (note,) = (line for line in first["told"] if "compute convolutions differently" in line)
    assert "compiled" in note and "TensorFlow's" in note
    assert first["virtual"] == second["virtual"]
    assert "--virtual-shards: hosts compute convolutions differently" in first["virtual"]

    recorded = json.loads((tmp_path / "plain" / "config.json").read_text())["run"]["convolutions"]
    assert "compiled" in recorded and "TensorFlow's" in recorded
