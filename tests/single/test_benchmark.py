"""The benchmarks' arithmetic on made-up measurements, where the answer is known exactly."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hvd_cifar import cli
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.tools.benchmark import tables
from hvd_cifar.tools.benchmark.commands import judge_efficiency, judge_sums
from hvd_cifar.tools.benchmark.results import Estimate
from tests.benchmark_results import allreduce_result, estimate, step_result


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
    assert tables.plain(found, 2) == "2.00 ± 0.58" and tables.plain(estimate(5), 1) == "5.0"


def test_a_world_is_as_fast_as_its_slowest_rank_and_loses_against_ranks_that_do_not_wait() -> None:
    from hvd_cifar.tools.benchmark.step import _world_result

    taken = {
        "step": [[2.0, 2.5], [2.5, 2.4]],
        "compute": [[1.0, 2.0], [1.0, 2.0]],
        "lockstep": [[2.1], [2.3]],
        "communication": [[0.1, 0.2], [0.2, 0.1]],
        "fed": [[2.5, 2.0], [3.0, 2.0]],
    }
    found = _world_result(2, taken, 100)
    assert found.images_per_second.mean == 80.0
    assert found.images_per_second_alone.mean == 150.0
    assert found.efficiency.mean == pytest.approx(80 / 150) and found.efficiency.standard_error == 0.0
    assert found.compute_seconds.mean == pytest.approx(200 / 150)
    assert found.lockstep_seconds.mean == pytest.approx(2.2)
    assert found.communication_seconds is not None and found.communication_seconds.mean == pytest.approx(0.2)
    assert found.input_cost.mean == pytest.approx((0.0 + 0.2) / 2)
    assert found.slowest == 1 and found.compute_by_rank == [1.0, 2.0]
    assert found.slowest_behind == pytest.approx(2 / 1 - 1)  # of two, the median is the faster


def test_sums_are_exact_and_terms_differ_by_rank() -> None:
    from hvd_cifar.tools.benchmark.allreduce import sizes, sums_of, terms_of

    for ranks in (2, 3, 17, 40):
        total = np.sum([terms_of(rank, 1000).astype(np.int64) for rank in range(ranks)], axis=0)
        assert (total == sums_of(ranks, 1000)).all()
    assert (terms_of(0, 100) != terms_of(1, 100)).all()
    assert (np.diff(terms_of(0, 2**24 + 100)[-200:]) != 0).all()  # beyond what float32 can count to
    assert sums_of(80_000, 13).max() < 2**24  # the last whole number that float32 can count to
    assert sizes(4, 64, 2) == [4, 8, 16, 32, 64]
    assert sizes(5, 100, 4) == [4, 20, 80, 100]
    assert sizes(4, 4, 2) == [4]


def test_numbers_of_ranks_to_measure() -> None:
    from hvd_cifar.tools.benchmark.job import sizes_to_measure

    assert sizes_to_measure(None, 8) == [1, 2, 4, 8]
    assert sizes_to_measure(None, 6, least=2) == [2, 4, 6]
    assert sizes_to_measure(None, 1) == [1]
    assert sizes_to_measure((3, 1), 4) == [1, 3]
    with pytest.raises(UserError, match=r"--ranks 5: this job has 4; start more \(-np 5\)"):
        sizes_to_measure((2, 5), 4)
    with pytest.raises(UserError, match="--ranks 1: one rank alone"):
        sizes_to_measure((1, 2), 4, least=2)
    with pytest.raises(UserError, match="this job has 1 rank"):
        sizes_to_measure(None, 1, least=2)


def test_the_gate_names_measured_and_wanted() -> None:
    step = step_result(4.0, {1: 1.0, 4: 0.87})
    judge_efficiency(step, 0.87)
    judge_efficiency(step, None)
    with pytest.raises(TrainingError, match="on 4 ranks is 0.8700, below --min-efficiency 0.9: 87 images/s, of 100"):
        judge_efficiency(step, 0.9)
    fine = allreduce_result([2])
    judge_sums(fine)
    spoilt = [p.model_copy(update={"wrong_values": 3 * (p.bytes == 2**16)}) for p in fine.points]
    with pytest.raises(TrainingError, match="3 values of an all-reduce of 65,536 bytes"):
        judge_sums(fine.model_copy(update={"points": spoilt}))


def test_an_output_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    from hvd_cifar.tools.benchmark.results import check_writable

    places = tmp_path, tmp_path / "none" / "x.png", Path("/proc/x"), Path("/dev/null"), tmp_path / ("x" * 251)
    for place in places:
        with pytest.raises(UserError, match=f"cannot write {place}"):
            check_writable(place)
    check_writable(None)
    check_writable(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_one_rank_is_told_to_become_more(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["allreduce"], ["step", "--ranks", "2"], ["step", "--min-efficiency", "0.9"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", *words])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and "-np 2" in err


def test_the_table_names_the_slowest_rank() -> None:
    step = step_result(4.0, {1: 1.0, 4: 0.5})
    last = step.worlds[-1].model_copy(update={"compute_by_rank": [4.0, 4.0, 5.0, 4.0]})
    assert "2 on h2, 25.0% behind the median" in tables.of_step(step.model_copy(update={"worlds": [last]}))
