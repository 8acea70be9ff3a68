"""The view of a run on terminals of several sizes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.reporting.run_files import Evaluated, Ranks, Train
from hvd_cifar.reporting.view import Course, View, in_words

TRAIN = Train(event="train", step=100, epoch=0.5, loss=1.25, learning_rate=0.1, images_per_second=640)
TESTED = {"event": "eval", "step": 200, "epoch": 1, "test_accuracy": 0.612, "test_loss": 1.5}
EVALUATED = Evaluated.model_validate(TESTED)
RANKS = Ranks(event="ranks", step=200, hosts=["a", "b"], compute_seconds=[0.08, 0.1], wait_seconds=[0.02, 0])
WHOLE = Course(global_batch_size=64, total_steps=1000, steps_per_epoch=200)


def shown(view: View, width: int = 100, height: int = 24) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height)
    with console.capture() as capture:
        console.print(view)
    return [line.rstrip() for line in capture.get().splitlines()]


def test_a_view_shows_the_newest_of_each_event() -> None:
    view = View(WHOLE, step=40)
    (bar,) = shown(view)
    assert "epoch 0.20 of 5" in bar and "step 40 of 1,000" in bar and "left" not in bar
    for event in (TRAIN, RANKS, EVALUATED.model_copy(update={"step": 150})):
        view.add(event)
    bar, values, *ranks = shown(view)
    assert "epoch 1.00 of 5" in bar and "step 200 of 1,000" in bar
    assert bar.endswith("0:01:20 left")  # 800 steps of 64 images, at 640 images/s
    assert values.split("   ") == ["loss 1.2500", "test accuracy 61.20%", "640 images/s", "learning rate 0.1"]
    assert "rank 0 on a" in ranks[0] and "computes 80.0 ms a step, waits 20.0 ms" in ranks[0]
    assert "slowest" in ranks[1] and "slowest" not in ranks[0]


def test_an_evaluation_on_examples_that_are_held_out_says_so() -> None:
    view = View(WHOLE)
    view.add(TRAIN)
    values = {"step": 200, "epoch": 1, "validation_accuracy": 0.5, "validation_loss": 2}
    found = Evaluated.model_validate({"event": "validation", **values})
    view.add(found)
    assert "validation accuracy 50.00%" in shown(view)[1]
    assert in_words(RANKS) is None and in_words(TRAIN) == "step 100, loss = 1.2500 (640.0 images/s)"
    assert in_words(found) == "step 200 (epoch 1.00): validation accuracy 50.00%, validation loss 2.0000"


@pytest.mark.parametrize(("height", "lines"), [(24, 4), (10, 4), (9, 2)])
def test_ranks_are_shown_where_there_is_room(height: int, lines: int) -> None:
    view = View(WHOLE)
    view.add(TRAIN)
    view.add(RANKS)
    assert len(shown(view, height=height)) == lines


@pytest.mark.parametrize("width", [20, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    view = View(WHOLE)
    for event in (TRAIN, EVALUATED, RANKS):
        view.add(event)
    lines = shown(view, width)
    assert len(lines) == 4 and all(len(line) <= width for line in lines)
    assert "step" in lines[0]


def test_larger_images_to_come_take_longer() -> None:
    """After 100 steps, of which 10 take a second, come 400 more, and 500 with four times the pixels."""
    view = View(Course(64, 1000, 200, ImageSizes((16, 32), 1000)))
    view.add(TRAIN)
    assert shown(view)[0].endswith("0:04:00 left")
