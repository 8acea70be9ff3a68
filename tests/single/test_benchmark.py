"""The benchmarks' arithmetic on made-up measurements, where the answer is known exactly."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hvd_cifar import cli
from hvd_cifar.errors import TrainingError
from hvd_cifar.tools.benchmark import allreduce, step
from hvd_cifar.tools.benchmark.allreduce import Point, sizes, sums_of, terms_of
from hvd_cifar.tools.benchmark.results import estimate, shown

ONE = estimate([1.0])
STEP = {
    **dict.fromkeys(("step_seconds", "compute_seconds", "fed_seconds", "input_cost"), ONE),
    **dict.fromkeys(("model", "precision", "dataset", "per_rank_batch_size", "steps", "compression"), "x"),
    "facts": {"hosts": ["h0", "h1", "h2", "h3"]},
    "bucket_bytes": None,
    "images_per_second": estimate([87.0]),
    "images_per_second_alone": estimate([100.0]),
    "efficiency": estimate([0.87]),
    "compute_by_rank": [4, 4, 5, 4],
}


def test_estimates() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert found == {"mean": 2.0, "standard_error": pytest.approx(1 / math.sqrt(3)), "n": 3}
    assert ONE["standard_error"] is None
    assert shown(found, 2) == "2.00 ± 0.58" and shown(ONE, 1, 100) == "100.0"


def test_sums_are_exact_and_terms_differ_by_rank() -> None:
    for ranks in (2, 3, 17, 40):
        total = np.sum([terms_of(rank, 1000).astype(np.int64) for rank in range(ranks)], axis=0)
        assert (total == sums_of(ranks, 1000)).all()
    assert (terms_of(0, 100) != terms_of(1, 100)).all()
    assert (np.diff(terms_of(0, 2**24 + 100)[-200:]) != 0).all()  # beyond what float32 can count to
    assert sums_of(80_000, 13).max() < 2**24  # the last whole number that float32 can count to
    assert sizes(100, 4) == [4, 16, 64, 100] and sizes(5, 2) == [4]


def test_the_gates_name_measured_and_wanted_and_the_table_the_slowest_rank() -> None:
    step.judge(STEP, 0.87)
    step.judge(STEP, None)
    with pytest.raises(TrainingError, match="on 4 ranks is 0.8700, below --min-efficiency 0.9: 87 images/s, of 100"):
        step.judge(STEP, 0.9)
    points = [Point(size, 1, ONE, 1.0, 1.0, wrong) for size, wrong in ((4, 0), (2**16, 3))]
    allreduce.judge(points[:1])
    with pytest.raises(TrainingError, match="3 values of an all-reduce of 65,536 bytes; do not"):
        allreduce.judge(points)
    assert "2 on h2, 25.0% behind the median" in step.table(STEP)
    assert "slowest" not in step.table({**STEP, "compute_by_rank": [4.0]})


def test_one_rank_is_told_to_become_more(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["allreduce"], ["step", "--min-efficiency", "0.9"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", *words])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and "-np 2" in err
