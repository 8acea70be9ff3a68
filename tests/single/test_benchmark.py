"""The benchmarks' arithmetic on made-up measurements, where the answer is known exactly."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from hvd_cifar import cli
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.tools.benchmark import tables
from hvd_cifar.tools.benchmark.commands import judge_efficiency, judge_sums
from hvd_cifar.tools.benchmark.results import AllreducePoint, AllreduceResult, Estimate, Facts, StepResult

FACTS = Facts("2024", "x", None, {}, "4 ranks", "made up", 4, ["h0", "h1", "h2", "h3"])
ONE = Estimate(1.0, None, 1)
STEP = StepResult(
    FACTS, "resnet20", "float32", "cifar10", 100, "none", None, 10,
    Estimate(87.0, None, 1), Estimate(100.0, None, 1), Estimate(0.87, None, 1), ONE, ONE, ONE, ONE, ONE, [4, 4, 5, 4],
)  # fmt: skip


def test_a_message_too_large_for_the_host_is_refused() -> None:
    from hvd_cifar.tools.benchmark.allreduce import BUFFERS, check_memory

    check_memory(2**20, 2, "node7", 2 * BUFFERS * 2**20)
    with pytest.raises(UserError, match="2 ranks of node7 need .* give --max-bytes at most 1048576"):
        check_memory(2**20 + 1, 2, "node7", 2 * BUFFERS * 2**20)


def test_estimates() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert Estimate.of([5.0]).standard_error is None
    assert tables.plain(found, 2) == "2.00 ± 0.58" and tables.plain(Estimate.of([5.0]), 1) == "5.0"


def test_sums_are_exact_and_terms_differ_by_rank() -> None:
    from hvd_cifar.tools.benchmark.allreduce import sizes, sums_of, terms_of

    for ranks in (2, 3, 17, 40):
        total = np.sum([terms_of(rank, 1000).astype(np.int64) for rank in range(ranks)], axis=0)
        assert (total == sums_of(ranks, 1000)).all()
    assert (terms_of(0, 100) != terms_of(1, 100)).all()
    assert (np.diff(terms_of(0, 2**24 + 100)[-200:]) != 0).all()  # beyond what float32 can count to
    assert sums_of(80_000, 13).max() < 2**24  # the last whole number that float32 can count to
    assert sizes(5, 100, 4) == [4, 20, 80, 100] and sizes(4, 4, 2) == [4]


def test_the_gates_name_measured_and_wanted() -> None:
    judge_efficiency(STEP, 0.87)
    judge_efficiency(STEP, None)
    with pytest.raises(TrainingError, match="on 4 ranks is 0.8700, below --min-efficiency 0.9: 87 images/s, of 100"):
        judge_efficiency(STEP, 0.9)
    points = [AllreducePoint(size, 1, ONE, 1.0, 1.0, wrong) for size, wrong in ((4, 0), (2**16, 3))]
    judge_sums(AllreduceResult(FACTS, points[:1]))
    with pytest.raises(TrainingError, match="3 values of an all-reduce of 65,536 bytes; do not"):
        judge_sums(AllreduceResult(FACTS, points))


def test_the_table_names_the_slowest_rank() -> None:
    assert "2 on h2, 25.0% behind the median" in tables.of_step(STEP)
    assert "slowest" not in tables.of_step(replace(STEP, compute_by_rank=[4.0]))


def test_one_rank_is_told_to_become_more(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["allreduce"], ["step", "--min-efficiency", "0.9"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", *words])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and "-np 2" in err
