"""Summaries as bytes, read back with TensorBoard's own readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from hvd_cifar.files import append
from hvd_cifar.reporting import board


def _read(folder: Path, step: int, *summaries: Any, graph: bytes | None = None) -> EventAccumulator:
    append(board.begin(folder, step), board.encode(step, summaries, graph))
    return EventAccumulator(str(folder)).Reload()


def _value(found: EventAccumulator, tag: str) -> Any:
    (event,) = found.Tensors(tag)
    return make_ndarray(event.tensor_proto)


def test_a_histogram_counts_every_finite_value(tmp_path: Path) -> None:
    values = np.random.default_rng(1).normal(size=(50, 7)).astype(np.float32)
    broken = np.append(values, np.array([np.nan, np.inf], np.float32))
    given = {"usual": values, "one value": np.full(9, 2.5), "broken": broken, "none": np.array([np.nan])}
    found = _read(tmp_path, 3, board.histograms({tag: board.histogram(v) for tag, v in given.items()}))
    left, right, counts = _value(found, "usual").T
    assert counts.shape == (30,) and counts.sum() == 350 and left[0] == values.min() and right[-1] == values.max()
    inside = [(values >= low).sum() - (values >= high).sum() for low, high in zip(left[1:-1], right[1:-1], strict=True)]
    assert counts[1:-1].tolist() == inside
    assert _value(found, "usual").tolist() == _value(found, "broken").tolist()
    left, right, counts = _value(found, "one value").T
    assert counts.sum() == 9 and (left[counts > 0] <= 2.5).all() and (right[counts > 0] >= 2.5).all()
    assert not _value(found, "none").any()


@pytest.mark.parametrize(
    "values",
    [
        np.array([1, 1 + 1e-7], np.float32),  # weights that start as ones, after a small step
        np.array([0, 5e-324]),
        np.array([-1.7e308, 1.7e308]),
        np.array([1.7e308, 1.7e308]),
    ],
)
def test_a_histogram_of_values_that_are_nearly_alike_or_very_large(values: NDArray[Any]) -> None:
    left, right, counts = board.histogram(values).T
    assert counts.sum() == values.size and (left < right).all() and np.isfinite([left, right]).all()
