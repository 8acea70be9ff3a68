"""The line that says how long a run takes: tables."""

from __future__ import annotations

import pytest

from hvd_cifar.extensions.forecast import forecast, roughly
from hvd_cifar.optim.schedules import ImageSizes
from hvd_cifar.training.plan import Plan


def _plan(total: int, all_steps: int = 300) -> Plan:
    return Plan(10_000, 100, 100, total, all_steps, 1.0, 0.0, 0)


@pytest.mark.parametrize(
    ("total", "sides", "step", "rate", "said"),
    [
        (300, (32,), 20, 100.0, "about 4.7 min of training left"),
        (50, (32,), 20, 100.0, "about 30 s of training left"),
        # A third of all steps at a quarter of the pixels: 80 + 4 * 200 of its seconds.
        (300, (16, 32, 32), 20, 100.0, "about 15 min of training left"),
        (300, (16, 32, 32), 200, 100.0, "about 1.7 min of training left"),
    ],
)
def test_the_rest_of_a_run(total: int, sides: tuple[int, ...], step: int, rate: float, said: str) -> None:
    assert forecast(_plan(total), ImageSizes(sides, 300), step, rate) == said


def test_a_run_without_an_end_in_sight() -> None:
    """Its steps are not counted one by one."""
    assert forecast(_plan(10**15, 10**15), ImageSizes((32,), 10**15), 20, 1e6).startswith("about 27,777,778 h of ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (89, "89 s"), (90, "1.5 min"), (601, "10 min"), (5399, "90 min"), (5400, "1.5 h"), (4e6, "1,111 h")],
)
def test_rough_times(seconds: float, words: str) -> None:
    assert roughly(seconds) == words
