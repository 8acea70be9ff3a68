"""The view of a run on terminals of several sizes."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from hvd_cifar.reporting.view import Course, View

TRAIN = {"event": "train", "step": 100, "epoch": 0.5, "loss": 1.25, "learning_rate": 0.1, "images_per_second": 640.0}
EVALUATED = {"event": "eval", "step": 200, "epoch": 1, "test_accuracy": 0.612, "test_loss": 1.5}
HELD_OUT = {"event": "validation", "step": 200, "epoch": 1, "validation_accuracy": 0.5, "validation_loss": 2}


def shown(*events: dict[str, Any], width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=24)
    view = View(Course(global_batch_size=64, total_steps=1000, steps_per_epoch=200), 40, console)
    for event in events:
        view.add(event)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_view_shows_the_newest_of_each_event() -> None:
    (bar,) = shown()
    assert "epoch 0.20 of 5" in bar and "step 40 of 1,000" in bar and "left" not in bar
    bar, values = shown(TRAIN, HELD_OUT, {**TRAIN, "step": 200}, {**EVALUATED, "step": 150})
    assert "epoch 1.00 of 5" in bar and "step 200 of 1,000" in bar
    assert bar.endswith("0:01:20 left")  # 800 steps of 64 images, at 640 images/s
    assert values.split("   ") == ["loss 1.2500", "test accuracy 61.20%", "640 images/s", "learning rate 0.1"]
    assert "validation accuracy 50.00%" in shown(TRAIN, HELD_OUT)[1]


@pytest.mark.parametrize("width", [20, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = shown(TRAIN, EVALUATED, width=width)
    assert len(lines) == 2 and all(len(line) <= width for line in lines) and "step" in lines[0]
