"""The benchmarks' arithmetic on made-up measurements, where the answer is known exactly."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar import cli, config
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.tools.benchmark import tables
from hvd_cifar.tools.benchmark.fits import Fit, Point, fit, fits_by_way, messages, traffic
from hvd_cifar.tools.benchmark.predict import predict, predict_one
from hvd_cifar.tools.benchmark.results import (
    AllreducePoint,
    AllreduceResult,
    Estimate,
    Facts,
    Gradient,
    Memory,
    Phases,
    SlowestRank,
    StepResult,
    WorldResult,
    read,
    write,
)

SIZES = [4 * 4**i for i in range(13)]
FACTS = Facts(
    date="2024-01-01T00:00:00+00:00",
    command="python -m hvd_cifar benchmark step",
    git_commit=None,
    versions={"python": "3.12"},
    processor="made up",
    cores=4,
    hosts=["a", "a", "b", "b"],
    device="/CPU:0",
    threads=1,
    controller="mpi",
)


def _points(truth: Fit, ranks: list[int], sizes: list[int] = SIZES) -> list[Point]:
    return [Point(p, size, truth.seconds(p, size)) for p in ranks for size in sizes]


def _estimate(value: float) -> Estimate:
    return Estimate(mean=value, standard_error=None, n=1)


def _step(compute: float, worlds: dict[int, float], phases: Phases, lag: float = 1.0) -> StepResult:
    """A result whose ranks compute in `compute` seconds, the slowest in `lag` times that, and reach `worlds`."""
    return StepResult(
        facts=FACTS,
        model="resnet20",
        precision="float32",
        dataset="cifar10",
        per_rank_batch_size=100,
        steps=10,
        worlds=[
            WorldResult(
                ranks=k,
                images_per_second=_estimate(k * 100 / compute * efficiency),
                images_per_second_alone=_estimate(k * 100 / compute),
                efficiency=_estimate(efficiency),
                step_seconds=_estimate(compute / efficiency),
                compute_seconds=_estimate(compute),
                lockstep_seconds=_estimate(compute * lag),
                communication_seconds=_estimate(0.02) if k > 1 else None,
                input_seconds=_estimate(0.01),
                fed_seconds=_estimate(compute / efficiency),
                input_cost=_estimate(0.0),
                compute_seconds_by_rank=[compute] * k,
                input_seconds_by_rank=[0.01] * k,
                slowest=SlowestRank(rank=0, host="a", behind_median=0.0),
            )
            for k, efficiency in worlds.items()
        ],
        phases=phases,
        memory_by_rank=[Memory(resident=2**30, proportional=2**29)] * max(worlds),
        waiting_cpu=0.1,
    )


def _allreduce(truth: Fit, ranks: list[int]) -> AllreduceResult:
    return AllreduceResult(
        facts=FACTS,
        points=[
            AllreducePoint(
                way="horovod",
                ranks=p.ranks,
                bytes=p.bytes,
                iterations=1,
                seconds=_estimate(p.seconds),
                algorithm_bandwidth=p.bytes / p.seconds,
                bus_bandwidth=p.bytes / p.seconds * traffic(p.ranks),
                wrong_values=0,
            )
            for p in _points(truth, ranks)
        ],
        fits={"horovod": truth},
        skipped={"mpi": "made up"},
    )


# 1 s forward, 2 s backward, 1 s update; 4 gradients of 100 bytes, every half second of the backward pass.
PHASES = Phases(
    forward_seconds=1.0,
    backward_seconds=2.0,
    update_seconds=1.0,
    gradients=[Gradient(name=f"g{i}", bytes=100, ready_seconds=i / 2) for i in range(1, 5)],
)


def test_the_ring_sends_what_the_formula_says() -> None:
    assert [messages(p) for p in (2, 3, 8)] == [2, 4, 14]
    assert [traffic(p) for p in (2, 4, 8)] == [1.0, 1.5, 1.75]
    one = Fit(start=1.0, alpha=0.1, beta=0.001)
    assert one.seconds(2, 1000) == pytest.approx(1 + 2 * 0.1 + 1.0)
    assert one.seconds(4, 1000) == pytest.approx(1 + 6 * 0.1 + 1.5)
    assert one.seconds(1, 1000) == 0.0


@given(
    start=st.floats(1e-4, 1e-2),
    alpha=st.floats(1e-6, 1e-3),
    beta=st.floats(1e-11, 1e-8),
    ranks=st.lists(st.sampled_from([2, 3, 4, 8, 64]), min_size=2, max_size=4, unique=True),
)
def test_a_fit_recovers_exact_numbers(start: float, alpha: float, beta: float, ranks: list[int]) -> None:
    found = fit(_points(Fit(start, alpha, beta), ranks), with_start=True)
    assert found is not None
    assert (found.start, found.alpha, found.beta) == pytest.approx((start, alpha, beta), rel=1e-4)
    assert found.largest_error < 1e-6


def test_one_number_of_ranks_tells_the_start_from_alpha_only_where_alpha_is_known() -> None:
    truth = Fit(start=5e-3, alpha=1e-5, beta=1e-9)
    points = _points(truth, [4])
    known = fit(points, with_start=True, alpha=1e-5)
    assert known is not None and (known.start, known.beta) == pytest.approx((5e-3, 1e-9), rel=1e-6)
    assert known.alpha == 1e-5
    unknown = fit(points, with_start=True)
    assert unknown is not None and unknown.alpha == 0.0 and not unknown.alpha_known
    assert unknown.start == pytest.approx(5e-3 + 6 * 1e-5, rel=1e-6)
    assert known.alpha_known and "alpha 10.0 us" in tables._fit(known) and "not known" in tables._fit(unknown)
    assert unknown.seconds(4, 1000) == pytest.approx(truth.seconds(4, 1000), rel=1e-6)


def test_the_messages_of_mpi_tell_horovod_s_start_where_all_were_measured_on_one_number_of_ranks() -> None:
    mpi, horovod = Fit(start=0.0, alpha=1e-5, beta=1e-9), Fit(start=5e-3, alpha=1e-5, beta=1e-9)
    for ranks, known in (([4], True), ([2, 4], True)):
        found = fits_by_way({"mpi": _points(mpi, ranks), "horovod": _points(horovod, ranks)})
        assert (found["horovod"].start, found["horovod"].alpha) == pytest.approx((5e-3, 1e-5), rel=1e-4)
        assert found["horovod"].alpha_known == known
    alone = fits_by_way({"horovod": _points(horovod, [4])})
    assert set(alone) == {"horovod"} and not alone["horovod"].alpha_known


@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0])
@pytest.mark.parametrize(("ranks", "truth"), [([2, 4, 8], Fit(0.0, 2e-5, 1e-9)), ([2], Fit(3e-4, 2e-5, 1e-9))])
def test_noise_makes_a_network_neither_faster_nor_slower(ranks: list[int], truth: Fit, noise: float) -> None:
    """Times that are twice as long as often as they are half as long, and more; 70 of them for each number of ranks."""
    draw = np.random.default_rng(0)
    exact = [Point(p, 4**k, truth.seconds(p, 4**k)) for p in ranks for k in range(1, 15) for _ in range(5)]
    noisy = [replace(point, seconds=point.seconds * float(np.exp(noise * draw.normal()))) for point in exact]
    found = fit(noisy, with_start=truth.start > 0, alpha=truth.alpha if len(ranks) == 1 else None)
    assert found is not None
    assert ("FITS BADLY" in tables._fit(found)) == (noise > 0.8)
    numbers = (found.start, found.alpha, found.beta)
    assert numbers == pytest.approx((truth.start, truth.alpha, truth.beta), rel=0.15 * max(1, noise / 0.5))


def test_a_fit_has_no_number_below_zero() -> None:
    # Faster with more ranks and with more bytes: the free solution has a negative alpha and beta.
    points = [Point(2, 1000, 3.0), Point(2, 2000, 2.9), Point(4, 1000, 2.0), Point(4, 2000, 1.9)]
    found = fit(points, with_start=True)
    assert found is not None
    assert found.alpha == found.beta == 0.0
    # Of logarithms the best constant is the geometric mean.
    times = np.array([p.seconds for p in points])
    assert found.start == pytest.approx(np.exp(np.log(times).mean()))
    assert found.errors == pytest.approx(sorted(abs(found.start / t - 1) for t in times))
    assert fit([Point(1, 4, 1.0), Point(1, 8, 1.0)], with_start=True) is None
    assert fit([Point(2, 4, 1.0), Point(4, 4, 2.0)], with_start=True) is None  # of one size alone


def test_prediction_limits() -> None:
    step = _step(4.0, {1: 1.0, 2: 0.9}, PHASES)
    free = predict_one(step, Fit(0.0, 0.0, 0.0), 512, step.worlds[-1])
    assert (free.efficiency, free.efficiency_overlapped) == (1.0, 1.0)
    alone = predict_one(step, Fit(1.0, 1.0, 1.0), 1, step.worlds[-1])
    assert (alone.efficiency, alone.efficiency_overlapped) == (1.0, 1.0)
    # Bandwidth alone: with many ranks an all-reduce takes 2 S beta, whatever their number.
    narrow = predict_one(step, Fit(0.0, 0.0, 0.01), 100_000, step.worlds[-1])
    assert narrow.communication_seconds == pytest.approx(2 * 400 * 0.01, rel=1e-4)
    assert narrow.efficiency == pytest.approx(4 / 12, rel=1e-4)
    # Latency alone grows with the ranks, and so does what is lost.
    slow = [predict_one(step, Fit(0.0, 0.001, 0.0), p, step.worlds[-1]).efficiency for p in (2, 16, 512)]
    assert slow == pytest.approx([4 / (4 + 2 * (p - 1) * 0.001) for p in (2, 16, 512)])


def test_overlap_hides_all_but_the_last_gradients() -> None:
    step = _step(4.0, {1: 1.0, 2: 0.9}, PHASES)
    # 2 ranks: 100 bytes take 0.2 s. Each is done before the next is ready; the last ends 0.2 s after the backward pass.
    found = predict_one(step, Fit(0.0, 0.0, 0.002), 2, step.worlds[-1])
    assert found.efficiency == pytest.approx(4 / 4.8)
    assert found.efficiency_overlapped == pytest.approx(4 / 4.2)
    # Where the computation takes twice as long, so do its parts, and the all-reduce does not.
    slower = _step(8.0, {1: 1.0, 2: 0.9}, PHASES)
    # 0.6 s for each gradient are hidden behind the second that lies between two of them now.
    assert predict_one(step, Fit(0.0, 0.0, 0.006), 2, slower.worlds[1]).efficiency_overlapped == pytest.approx(8 / 8.6)


def test_ranks_wait_for_the_slowest() -> None:
    step = _step(4.0, {1: 1.0, 2: 0.9}, PHASES, lag=1.25)
    found = predict_one(step, Fit(0.0, 0.0, 0.002), 2, step.worlds[-1])
    assert found.efficiency == pytest.approx(4 / (5 + 0.8))
    assert found.efficiency_overlapped == pytest.approx(4 / (5 + 0.2))
    assert predict_one(step, Fit(0.0, 0.0, 0.002), 1, step.worlds[-1]).efficiency == 1.0


def test_predictions_use_the_link_and_checks_use_what_was_measured() -> None:
    measured = Fit(start=0.001, alpha=0.01, beta=0.001)
    step = _step(4.0, {1: 1.0, 2: 0.8, 4: 0.7}, PHASES)
    worlds = list(step.worlds)
    for i, seconds in enumerate((8.0, 4.0, 2.0)):
        changes = {"compute_seconds": _estimate(seconds), "lockstep_seconds": _estimate(seconds)}
        worlds[i] = worlds[i].model_copy(update=changes)
    step = step.model_copy(update={"worlds": worlds})
    found = predict(step, _allreduce(measured, [2, 4]), [2, 64], link=100.0, latency=0.5)
    # A check computes as was measured on as many ranks, and another one as on the fewest; a prediction as on the most.
    times = [(c.efficiency, c.communication_seconds) for c in (*found.checks, found.predictions[1])]
    assert [e for e, _ in times] == pytest.approx([s / (s + t) for s, (_, t) in zip((4, 2, 4, 2), times, strict=True)])
    assert [(c.ranks, c.measured_on, c.measured) for c in found.checks] == [(2, 2, 0.8), (4, 4, 0.7), (4, 2, 0.7)]
    assert found.predictions[1].measured_on == 4
    assert found.checks[2].error == pytest.approx(found.checks[2].efficiency / 0.7 - 1)
    assert json.loads(found.model_dump_json())["checks"][2]["error"] == found.checks[2].error
    # Of two ranks alone, without MPI's alpha, the fit takes two messages for the start; four ranks send six.
    of_two = fit(_points(measured, [2]), with_start=True)
    assert of_two is not None and of_two.alpha == 0.0
    assert found.checks[2].communication_seconds == pytest.approx(of_two.seconds(4, 400))
    assert found.checks[2].communication_seconds == pytest.approx(measured.seconds(4, 400) - 4 * measured.alpha)
    assert found.checks[0].communication_seconds == pytest.approx(measured.seconds(2, 400))
    assert found.predictions[1].communication_seconds == pytest.approx(Fit(0.001, 0.5, 0.01).seconds(64, 400))
    plain = predict(step, _allreduce(measured, [2, 4]), [2])
    assert plain.link_fit == measured
    assert plain.predictions[0].communication_seconds == plain.checks[0].communication_seconds
    shown = tables.of_predict(found)
    assert f"{found.checks[0].efficiency / 0.8 - 1:+.1%}" in shown and "0.7" in shown
    # What lies beyond the measurements is told: more ranks where alpha is not known, longer messages than any.
    assert of_two.alpha_known is False and "NOT KNOWN" not in shown and "ARE LONGER" not in shown
    few = _allreduce(of_two, [2])
    assert "ALPHA IS NOT KNOWN from all-reduces on 2 ranks" in tables.of_predict(predict(step, few, [2, 64]))
    assert "NOT KNOWN from" not in tables.of_predict(predict(step, few, [2]))
    assert "NOT KNOWN from" not in tables.of_predict(predict(step, few, [64], latency=0.5))
    short = few.model_copy(update={"points": [p for p in few.points if p.bytes < 400]})
    assert "GRADIENTS ARE LONGER than" in tables.of_predict(predict(step, short, [2]))
    # Nothing is checked "as a prediction is made" where no all-reduce was measured on the fewest ranks.
    of_four = predict(step, _allreduce(measured, [4, 8]), [2])
    assert [(c.ranks, c.measured_on) for c in of_four.checks] == [(2, 2), (4, 4)]
    with pytest.raises(UserError, match="no fit of Horovod's"):
        predict(step, _allreduce(measured, [2, 4]).model_copy(update={"fits": {}}), [2])


def test_hosts_are_counted_by_local_ranks_since_two_may_share_a_name() -> None:
    step = _step(4.0, {1: 1.0, 2: 0.8}, PHASES)
    assert "4 ranks on 2 hosts, made up" in tables.of_step(step)  # of an older version: by name
    twins = FACTS.model_copy(update={"hosts": ["a"] * 4, "local_ranks": [0, 0, 1, 0]})
    assert "4 ranks on 3 hosts, made up" in tables.of_step(step.model_copy(update={"facts": twins}))


def test_a_prediction_from_two_machines_says_so() -> None:
    step, allreduce = _step(4.0, {1: 1.0, 2: 0.8}, PHASES), _allreduce(Fit(0.001, 0.01, 0.001), [2])
    assert "THE TWO MEASUREMENTS DIFFER" not in tables.of_predict(predict(step, allreduce, [2]))
    elsewhere = allreduce.model_copy(
        update={"facts": FACTS.model_copy(update={"hosts": ["x", "x"], "controller": "gloo"})}
    )
    found = predict(step, elsewhere, [2])
    assert "THE TWO MEASUREMENTS DIFFER (hosts, controller)" in tables.of_predict(found)
    assert (found.step_facts, found.allreduce_facts.hosts) == (FACTS, ["x", "x"])


def test_a_message_too_large_for_the_host_is_refused() -> None:
    from hvd_cifar.tools.benchmark.allreduce import check_memory

    check_memory(2**20, 2, "node7", 16 * 2**20, "")
    with pytest.raises(UserError, match=r"of 1,048,577 bytes: 2 ranks of node7 need .* give at most 1,048,576"):
        check_memory(2**20 + 1, 2, "node7", 16 * 2**20, "give at most {most:,}")


def test_estimates() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.standard_error == pytest.approx(1 / math.sqrt(3))
    assert Estimate.of([5.0]).standard_error is None
    assert tables.plain(found, 2) == "2.00 ± 0.58" and tables.plain(_estimate(5), 1) == "5.0"


def test_a_world_is_as_fast_as_its_slowest_rank_and_loses_against_ranks_that_do_not_wait() -> None:
    from hvd_cifar.tools.benchmark.step import _world_result

    taken = {
        "step": [[2.0, 2.5], [2.5, 2.4]],
        "compute": [[1.0, 2.0], [1.0, 2.0]],
        "lockstep": [[2.1], [2.3]],
        "communication": [[0.1, 0.2], [0.2, 0.1]],
        "input": [[0.1, 0.3], [0.1, 0.3]],
        "fed": [[2.5, 2.0], [3.0, 2.0]],
    }
    found = _world_result(2, taken, 100, ["a", "b"])
    assert found.images_per_second.mean == 80.0
    assert found.images_per_second_alone.mean == 150.0
    assert found.efficiency.mean == pytest.approx(80 / 150) and found.efficiency.standard_error == 0.0
    assert found.compute_seconds.mean == pytest.approx(200 / 150)
    assert found.lockstep_seconds.mean == pytest.approx(2.2)
    assert found.communication_seconds is not None and found.communication_seconds.mean == pytest.approx(0.2)
    assert found.input_cost.mean == pytest.approx((0.0 + 0.2) / 2)
    assert (found.slowest.rank, found.slowest.host) == (1, "b")
    assert found.slowest.behind_median == pytest.approx(2 / 1 - 1)  # of two, the median is the faster
    assert found.input_seconds_by_rank == pytest.approx([0.1, 0.3])
    assert found.communication_seconds_by_rank == pytest.approx([0.15, 0.15])
    assert found.step_seconds_by_rank == pytest.approx([2.25, 2.45])


def test_gradients_get_ready_from_the_last_layer_on_and_never_before_an_earlier_part() -> None:
    import keras

    from hvd_cifar.models import Net
    from hvd_cifar.tools.benchmark.step import _phases

    model = keras.Sequential([keras.Input((3,)), *(keras.layers.Dense(3, use_bias=False) for _ in range(4))])
    # The second quarter is measured as shorter than the first: noise.
    taken = {"forward": 1.0, "backward 1": 1.5, "backward 2": 1.25, "backward 3": 2.0, "backward 4": 3.0}
    taken["compute"] = 3.5
    found = _phases(Net(model, []), {phase: [[seconds, seconds]] for phase, seconds in taken.items()})
    assert (found.forward_seconds, found.backward_seconds, found.update_seconds) == (1.0, 2.0, 0.5)
    assert [gradient.name for gradient in found.gradients] == [v.path for v in model.trainable_variables[::-1]]
    assert [gradient.ready_seconds for gradient in found.gradients] == [0.5, 0.5, 1.0, 2.0]
    assert {gradient.bytes for gradient in found.gradients} == {36}


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
    from hvd_cifar.tools.benchmark.commands import judge_efficiency, judge_sums

    step = _step(4.0, {1: 1.0, 4: 0.87}, PHASES)
    judge_efficiency(step, 0.87)
    judge_efficiency(step, None)
    with pytest.raises(TrainingError, match="on 4 ranks is 0.8700, below --min-efficiency 0.9: 87 images/s, of 100"):
        judge_efficiency(step, 0.9)
    fine = _allreduce(Fit(0.0, 1e-5, 1e-9), [2])
    judge_sums(fine)
    spoilt = [p.model_copy(update={"wrong_values": 3 * (p.bytes == 64)}) for p in fine.points]
    with pytest.raises(TrainingError, match="3 values of an all-reduce of 64 bytes"):
        judge_sums(fine.model_copy(update={"points": spoilt}))


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("link", "10Gbit/s", 1.25e9),
        ("link", "12.5 GB/s", 12.5e9),
        ("link", "100 Mbit/s", 1.25e7),
        ("latency", "20us", 2e-5),
        ("latency", "1.5ms", 1.5e-3),
        ("latency", "0s", 0.0),
        ("ranks", "512,2, 4,2", (2, 4, 512)),
    ],
)
def test_quantities(field: str, text: str, value: Any) -> None:
    found = getattr(config.make(config.BenchmarkPredictSettings, {field: text}), field)
    assert found == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("4", 4), ("64K", 2**16), ("256MiB", 2**28), ("0.5G", 2**29)])
def test_sizes(text: str, value: int) -> None:
    assert config.make(config.BenchmarkAllreduceSettings, {"max_bytes": text}).max_bytes == value


def test_results_survive_their_files(tmp_path: Path) -> None:
    step = _step(4.0, {1: 1.0, 2: 0.9}, PHASES)
    write(tmp_path / "step.json", step)
    assert read(StepResult, tmp_path / "step.json", "--step") == step
    allreduce = _allreduce(Fit(0.001, 1e-5, 1e-9, errors=(0.1, 0.2)), [2, 4])
    write(tmp_path / "allreduce.json", allreduce)
    assert read(AllreduceResult, tmp_path / "allreduce.json", "--allreduce") == allreduce


def test_predict_works_from_files_without_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "s.json", _step(4.0, {1: 1.0, 2: 0.9}, PHASES))
    write(tmp_path / "a.json", _allreduce(Fit(0.001, 1e-5, 1e-4), [2, 4]))
    files = ["--step", str(tmp_path / "s.json"), "--allreduce", str(tmp_path / "a.json")]
    outputs = ["--json", str(tmp_path / "p.json"), "--plot", str(tmp_path / "p.png")]
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", "predict", *files, *outputs, "--ranks", "2,64", "--link", "1kB/s"])
    out, err = capfd.readouterr()
    assert ended.value.code == 0, err
    assert "efficiency to expect" in out and "0.900" in out
    found = json.loads((tmp_path / "p.json").read_text())
    assert [p["ranks"] for p in found["predictions"]] == [2, 64]
    assert found["link_fit"]["beta"] == 1e-3 and found["fit"]["beta"] == 1e-4
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.json", None, "No such file"),
        ("text.json", "{", "is no result of `benchmark step`"),
        ("other.json", '{"benchmark": "allreduce"}', "is no result of `benchmark step`"),
    ],
)
def test_predict_refuses_other_files_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str, content: str | None, said: str
) -> None:
    write(tmp_path / "a.json", _allreduce(Fit(0.001, 1e-5, 1e-9), [2, 4]))
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", "predict", "--step", str(tmp_path / name), "--allreduce", str(tmp_path / "a.json")])
    out, err = capfd.readouterr()
    assert (ended.value.code, out, len(err.splitlines())) == (2, "", 1)
    assert said in err and "--step" in err


def test_an_output_that_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Neither input is there, either; the output is what is complained of.
    files = ["--step", str(tmp_path / "s.json"), "--allreduce", str(tmp_path / "a.json")]
    for option, place in (("--json", tmp_path), ("--plot", tmp_path / "none" / "x.png"), ("--json", Path("/proc/x"))):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", "predict", *files, option, str(place)])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and f"cannot write {place}" in err
    same = ["--json", str(tmp_path / "x"), "--plot", str(tmp_path / "x")]
    for words in (same, ["--json", str(tmp_path / "s.json")]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", "predict", *files, *words])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and f"{words[-1]} is given twice" in err
    assert not list(tmp_path.iterdir())


def test_one_rank_is_told_to_become_more(capfd: pytest.CaptureFixture[str]) -> None:
    for words in (["allreduce"], ["predict"], ["step", "--ranks", "2"], ["step", "--min-efficiency", "0.9"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["benchmark", *words])
        _, err = capfd.readouterr()
        assert ended.value.code == 2 and len(err.splitlines()) == 1 and "-np 2" in err


def test_tables_show_the_slowest_ranks_of_many() -> None:
    step = _step(4.0, {1: 1.0, 40: 0.5}, PHASES)
    slow = [4.0 + rank / 100 for rank in range(40)]
    last = step.worlds[-1].model_copy(update={"compute_seconds_by_rank": slow})
    facts = FACTS.model_copy(update={"hosts": [f"h{rank}" for rank in range(40)]})
    shown = tables.of_step(step.model_copy(update={"worlds": [step.worlds[0], last], "facts": facts}))
    assert "h39" in shown and "h24" in shown and "h23" not in shown
    assert "16 slowest ranks of 40" in shown
