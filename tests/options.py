"""Options and files that many tests share."""

from __future__ import annotations

from typing import Any

# A small net on a set that needs no download; the folder of the set follows.
TUTORIAL = ("--model", "tutorial", "--dataset", "synthetic", "--data-dir")

# A run's files, as small as readers take them.
CONFIG: dict[str, Any] = {
    "model": "tutorial",
    "precision": None,
    "seed": 0,
    "global_batch_size": 64,
    "run": {
        "dataset": "cifar10",
        "world_size": 2,
        "hosts": ["a", "b"],
        "device": "/CPU:0",
        "threads": 1,
        "controller": "mpi",
        "command": "python -m hvd_cifar train",
        "hvd_cifar": "0.2.0",
        "git_commit": None,
        "versions": {"tensorflow": "2.21.0"},
        "total_steps": 100,
        "steps_per_epoch": 50,
    },
}
TRAIN_LINE = '{"event": "train", "step": 10, "epoch": 0.2, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 9}\n'
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
CONFUSION: dict[str, Any] = {
    "step": 10,
    "split": "test",
    "class_names": ["cat", "dog"],
    "matrix": [[7, 1], [3, 5]],
    "mistakes": [
        {"index": 4, "label": 0, "predicted": 1, "probabilities": [0.1, 0.9], "image": f"data:image/png;base64,{PIXEL}"}
    ],
}
