"""Ranks whose thread counts differ, so that their sums round differently, train with the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.ranks import run_ranks

THREADS = (1, 8)  # of the two ranks; TensorFlow divides a sum of 589,824 values into other parts


# Options, and megabytes that ranks take from rank 0 in each step.
CASES: list[tuple[dict[str, Any], float | None]] = [
    ({"optimizer": "muon"}, 2.4),  # the weights
    ({"optimizer": "sgd", "clip_norm": 0.01}, 4.8),  # and the velocities
    ({"optimizer": "sgd"}, None),
]


def _train_each(folder: str) -> list[dict[str, Any]]:
    return [_train(f"{folder}-{number}", options) for number, (options, _) in enumerate(CASES)]


def _train(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    import keras
    import numpy as np

    import hvd_cifar
    from hvd_cifar.optim.muon import Muon
    from hvd_cifar.reporting import terminal
    from hvd_cifar.runtime.environment import launched_rank

    optimizers: dict[str, Any] = {"muon": Muon, "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9)}

    def build(image_shape: tuple[int, int, int], classes: int) -> Any:
        images = keras.Input(image_shape)
        x = keras.layers.Conv2D(256, 3, strides=2)(images)
        x = keras.layers.Conv2D(256, 3, use_bias=False)(keras.layers.ReLU()(x))
        x = keras.layers.Dense(classes)(keras.layers.Flatten()(keras.layers.ReLU()(x)))
        return keras.Model(images, x), hvd_cifar.Recipe(optimizer=optimizers[options["optimizer"]], lookahead=True)

    told: list[str] = []
    vars(terminal)["say"] = told.append
    images = np.random.default_rng(0).integers(0, 256, (16, 8, 8, 3)).astype(np.uint8)
    data = hvd_cifar.Dataset.from_arrays(images, np.arange(16) % 2, images, np.arange(16) % 2)
    settings: dict[str, Any] = {
        "global_batch_size": 8,
        "max_steps": 6,
        "check_sync_every": 1,
        "eval_every": 0,
        "learning_rate": 0.1,
    }
    settings |= {"threads_per_rank": THREADS[launched_rank() or 0], "epochs": 3, "run_dir": folder}
    settings["set"] = {"warmup_epochs": 0}
    settings |= {key: value for key, value in options.items() if key != "optimizer"}
    try:
        found = hvd_cifar.train(build, data, **settings)["replicas_identical"]
    except hvd_cifar.TrainingError as error:
        found = str(error)
    return {"identical": found, "told": [line for line in told if line.startswith("unlike ranks")]}


def test_unlike_ranks_keep_the_same_weights(tmp_path: Path) -> None:
    ranks = run_ranks(_train_each, 2, str(tmp_path / "run"))
    for (options, megabytes), first, second in zip(CASES, *ranks, strict=True):
        assert first["identical"] is second["identical"] is True, options
        assert not second["told"]
        if megabytes is None:
            assert not first["told"]
        else:
            (line,) = first["told"]
            assert f"so all take rank 0's ({megabytes} MB a step): 1 thread of " in line and "; 8 threads of " in line
