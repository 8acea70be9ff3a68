"""The view of a run on terminals of several sizes."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from hvd_cifar.config import make
from hvd_cifar.data.image_sizes import ImageSizes
from hvd_cifar.reporting.run_files import Evaluated, Ranks, Train, Validated
from hvd_cifar.reporting.view import Course, View, in_words
from hvd_cifar.tools.settings import WatchSettings
from hvd_cifar.tools.watch import _Followed
from tests.run_dirs import CONFIG, write_run

TRAIN = Train(event="train", step=100, epoch=0.5, loss=1.25, learning_rate=0.1, images_per_second=640)
EVALUATED = Evaluated(event="eval", step=200, epoch=1, test_accuracy=0.612, test_loss=1.5)
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
    found = Validated(event="validation", step=200, epoch=1, validation_accuracy=0.5, validation_loss=2)
    view.add(found)
    assert "validation accuracy 50.00%" in shown(view)[1]
    assert in_words(found) == "step 200 (epoch 1.00): validation accuracy 50.00%, validation loss 2.0000"


@pytest.mark.parametrize(("height", "lines"), [(24, 4), (10, 4), (9, 2)])
def test_ranks_are_shown_where_there_is_room(height: int, lines: int) -> None:
    view = View(WHOLE)
    view.add(TRAIN)
    view.add(RANKS)
    assert len(shown(view, height=height)) == lines


@pytest.mark.parametrize("width", [20, 40, 80, 200])
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


def test_watch_knows_the_sizes_of_images(tmp_path: Path) -> None:
    sizes = {"all_steps": 200, "image_heights": [16, 32]}
    for name, more, expected in (("older", {}, None), ("newer", sizes, ImageSizes((16, 32), 200))):
        run_dir = write_run(tmp_path / name, config=CONFIG | {"run": CONFIG["run"] | more})
        assert _Followed(make(WatchSettings, {"run_dir": run_dir})).view.course.sizes == expected


def test_a_run_whose_length_is_not_known_has_no_bar() -> None:
    view = View(Course(64, None, None))
    view.add(TRAIN)
    assert shown(view)[0] == "step 100"


def test_lines_of_events() -> None:
    assert in_words(TRAIN) == "step 100, loss = 1.2500 (640.0 images/s)"
    assert in_words(EVALUATED) == "step 200 (epoch 1.00): test accuracy 61.20%, test loss 1.5000"
    assert in_words(RANKS) is None
