"""Folders of runs: written by hand, with numbers that a test knows; what real runs have used; and a full disk."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import runs

CONFIG: dict[str, Any] = {
    "model": "tutorial",
    "precision": None,
    "seed": 0,
    "global_batch_size": 64,
    "run": {
        "dataset": "cifar10",
        "world_size": 2,
        "hosts": ["a", "b"],
        "processors": ["AMD EPYC", "AMD EPYC"],
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
TRAIN = {"event": "train", "step": 10, "epoch": 0.2, "loss": 0.25, "learning_rate": 0.1, "images_per_second": 9}
TRAIN_LINE = json.dumps(TRAIN) + "\n"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC"
CONFUSION: dict[str, Any] = {
    "dataset": "birds",
    "step": 10,
    "split": "test",
    "class_names": ["cat", "dog"],
    "matrix": [[7, 1], [3, 5]],
    "mistakes": [
        {"index": 4, "label": 0, "predicted": 1, "probabilities": [0.1, 0.9], "image": f"data:image/png;base64,{PIXEL}"}
    ],
}


def ranks(step: int, compute: list[float], hosts: list[str]) -> dict[str, Any]:
    return {"event": "ranks", "step": step, "hosts": hosts, "compute_seconds": compute, "wait_seconds": [0.01] * 2}


EVENTS = [
    TRAIN,
    ranks(10, [9.0, 9.0], ["a", "c"]),  # of a set of ranks that is gone
    {"event": "eval", "step": 50, "epoch": 1, "test_accuracy": 0.5, "test_loss": 1.5},
    ranks(30, [0.1, 0.2], ["a", "b"]),
    ranks(70, [0.2, 0.1], ["a", "b"]),
    {**TRAIN, "step": 60, "epoch": 1.2, "images_per_second": 11},
]
MARKS = [
    {"mark": "launch", "time": 1e9 + 1, "began": 1e9, "ranks": 2},
    {"mark": "start", "time": 1e9 + 10, "step": 0},
    {"mark": "evaluation", "time": 1e9 + 60, "began": 1e9 + 50, "step": 50},
    {"mark": "warning", "time": 1e9 + 80, "step": 60, "text": "rank 1 is slow"},
    {"mark": "end", "time": 1e9 + 100, "step": 60, "how": "stopped"},
]


def write_run(
    run_dir: Path,
    config: dict[str, Any] = CONFIG,
    confusion: dict[str, Any] | None = CONFUSION,
    events: list[dict[str, Any]] = EVENTS,
    marks: list[dict[str, Any]] = MARKS,
) -> Path:
    """Write the files of a run into a folder that is made."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps(config))
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (run_dir / "sessions.jsonl").write_text("".join(f"{json.dumps(mark)}\n" for mark in marks))
    if confusion:
        (run_dir / "confusion.json").write_text(json.dumps(confusion))
    return run_dir


def examples(run_dir: Path) -> dict[int, list[int]]:
    """The examples of each step over all ranks, in order, by --record-examples; every step is there once."""
    entries = runs.events(run_dir, "examples.jsonl")
    assert [entry["step"] for entry in entries] == list(range(1, len(entries) + 1))
    return {entry["step"]: sorted(sum(entry["ranks"], [])) for entry in entries}


def used(by_step: dict[int, list[int]], first: int, last: int) -> list[int]:
    """The examples of the steps first .. last, in order."""
    return sorted(sum((by_step[step] for step in range(first, last + 1)), []))


@contextmanager
def full_disk(most: int = 16) -> Iterator[None]:
    """A limit on the size of files, in bytes, stands in for it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
