"""What training runs left in their run directories, and how far apart two of them are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np


def losses(run_dir: Path) -> dict[int, float]:
    """The losses of a run by step."""
    return {e["step"]: e["loss"] for e in events(run_dir) if e["event"] == "train"}


def steps(run_dir: Path) -> list[int]:
    """The steps of a run's log lines, in their order."""
    return [e["step"] for e in events(run_dir) if e["event"] == "train"]


def events(run_dir: Path, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a run's file."""
    path = run_dir / file
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # the line that a killed run was writing
    return found


def weights(run_dir: Path, part: str = "model") -> dict[str, Any]:
    """The variables of a part of the newest checkpoint by their names there, without counts."""
    from hvd_cifar.training.checkpoint import find, read

    path = find(run_dir)
    assert path is not None, f"no checkpoint in {run_dir}"
    return {name: value for name, value in read(path).items() if name.startswith(f"state/{part}/") and value.shape}


def loss_apart(one: dict[int, float], other: dict[int, float], up_to: int) -> float:
    """The largest relative difference of a step's loss, over the first `up_to` steps."""
    return float(np.max([abs(other[step] / one[step] - 1) for step in one if step <= up_to]))  # a NaN stays one


def weights_apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a weight, as a fraction of its variable's largest absolute value."""
    assert one.keys() == other.keys() and one
    return float(np.max([np.abs(other[n] - one[n]).max() / max(np.abs(one[n]).max(), 1e-30) for n in one]))


def summary(run_dir: Path) -> dict[str, Any]:
    """A run's summary.json."""
    found: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return found
