"""What training runs left in their run directories, and how far apart two of them are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from hvd_cifar.config import TrainSettings


def losses(run_dir: Path) -> dict[int, float]:
    """The losses of a run by step."""
    path = run_dir / "metrics.jsonl"
    events = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            events.append(json.loads(line))
        except ValueError:
            break  # the line that a killed run was writing
    return {e["step"]: e["loss"] for e in events if e["event"] == "train"}


def weights(run_dir: Path, settings: TrainSettings) -> dict[str, Any]:
    """The model's variables in the newest checkpoint, by name."""
    return _restored(run_dir, settings)[0]


def averages(run_dir: Path, settings: TrainSettings) -> dict[str, Any]:
    """The moving averages of the model's variables in the newest checkpoint, by the variables' names."""
    return _restored(run_dir, settings)[1]


def _restored(run_dir: Path, settings: TrainSettings) -> tuple[dict[str, Any], dict[str, Any]]:
    import tensorflow as tf

    from hvd_cifar.models import build
    from hvd_cifar.optim.averages import MovingAverage
    from hvd_cifar.training.checkpoint import find, restore
    from hvd_cifar.training.recipe import precision_of, set_precision
    from hvd_cifar.training.sources import views_of

    path = find(run_dir)
    assert path is not None, f"no checkpoint in {run_dir}"
    set_precision(precision_of(settings), settings.seed)
    model = build(settings.model, views_of(settings.model).side, precision_of(settings)).model
    parts: dict[str, Any] = {"model": model}
    averages = MovingAverage(model.trainable_variables, settings.ema_decay) if settings.ema_decay else None
    if averages:
        parts["averages"] = tf.train.Checkpoint(variables=[v.value for v in averages.variables])
    restore(tf.train.Checkpoint(**parts), path, partial=True)
    averaged = zip(averages.sources, averages.values, strict=True) if averages else ()
    return {v.path: v.numpy() for v in model.variables}, {v.path: average.numpy() for v, average in averaged}


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
