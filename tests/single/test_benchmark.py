"""The benchmarks' arithmetic on made-up measurements, where the answer is known exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_cifar import cli, config
from hvd_cifar.distributed.overlap import Backward
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.tools.benchmark import tables
from hvd_cifar.tools.benchmark.fits import Fit, Layout, Point, fit, messages, traffic
from hvd_cifar.tools.benchmark.predict import Measured, Network, predict, predict_one
from hvd_cifar.tools.benchmark.results import (
    AllreducePoint,
    AllreduceResult,
    EmulatedResult,
    EmulatedWorld,
    Estimate,
    Facts,
    Gradient,
    InputResult,
    Memory,
    Phases,
    Prediction,
    SlowestRank,
    StepResult,
    WorldResult,
    read,
    write,
)
from tests.run_dirs import write_run

SIZES = [2**14 * 4**i for i in range(6)]
LINK = [Layout(2, 1), Layout(4, 1), Layout(8, 1)]  # a rank a host
FACTS = Facts(
    date="2024-01-01T00:00:00+00:00",
    command="python -m hvd_cifar benchmark step",
    git_commit=None,
    versions={"python": "3.12"},
    processor="made up",
    cores=4,
    hosts=["a", "a", "b", "b"],
    local_ranks=[0, 1, 0, 1],
    device="/CPU:0",
    threads=1,
    controller="mpi",
)


def _points(truth: Fit, layouts: Iterable[Layout], sizes: list[int] = SIZES) -> list[Point]:
    return [Point(layout, size, truth.seconds(layout, size)) for layout in layouts for size in sizes]


def _estimate(value: float) -> Estimate:
    return Estimate(mean=value, standard_error=None, n=1)


def _step(compute: float, worlds: dict[int, float], phases: Phases, lag: float = 1.0) -> StepResult:
    """A result of a rank a host, which compute in `compute` seconds, the slowest in `lag` times, and reach `worlds`."""
    return StepResult(
        facts=_facts_of(max(worlds)),
        model="resnet20",
        precision="float32",
        dataset="cifar10",
        per_rank_batch_size=100,
        compression="none",
        bucket_bytes=None,
        messages=[sum(gradient.bytes for gradient in phases.gradients)],
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


def _facts_of(ranks: int) -> Facts:
    return FACTS.model_copy(update={"hosts": [f"h{rank}" for rank in range(ranks)], "local_ranks": [0] * ranks})


def _allreduce(truth: Fit, ranks: list[int], work: float = 0.0) -> AllreduceResult:
    """Of a rank a host; `work`: the part of the time that the processor works."""
    return AllreduceResult(
        facts=_facts_of(max(ranks)),
        points=[
            AllreducePoint(
                way="horovod",
                ranks=p.layout.ranks,
                bytes=p.bytes,
                iterations=1,
                seconds=_estimate(p.seconds),
                algorithm_bandwidth=p.bytes / p.seconds,
                bus_bandwidth=p.bytes / p.seconds * traffic(p.layout.ranks),
                processor_seconds=p.seconds * work,
                wrong_values=0,
            )
            for p in _points(truth, [Layout(k, 1) for k in ranks])
        ],
        fits={
            "horovod": truth,
            "processor": Fit(truth.start * work, truth.alpha * work, truth.beta * work),
        },
        skipped={"mpi": "made up"},
    )


# 1 s forward, 2 s backward, 1 s update; 4 gradients of 100 bytes, every half second of the backward pass.
PHASES = Phases(
    forward_seconds=1.0,
    backward_seconds=2.0,
    update_seconds=1.0,
    gradients=[Gradient(name=f"g{i}", bytes=100, ready_seconds=i / 2) for i in range(1, 5)],
)


def test_the_levels_send_what_the_formula_says() -> None:
    assert [messages(n) for n in (1, 2, 3, 8)] == [0, 2, 4, 14]
    assert [traffic(n) for n in (1, 2, 4, 8)] == [0.0, 1.0, 1.5, 1.75]
    one = Fit(start=1.0, alpha=0.1, beta=0.001, local_alpha=0.01, local_beta=0.0001)
    assert one.seconds(Layout(2, 1), 1000) == pytest.approx(1 + 2 * 0.1 + 1.0)
    assert one.seconds(Layout(1, 4), 1000) == pytest.approx(1 + 6 * 0.01 + 0.15)
    assert one.seconds(Layout(4, 2), 1000) == pytest.approx(1 + 6 * 0.1 + 2 * 0.01 + 1.5 + 0.1)
    assert one.seconds(Layout(1, 1), 1000) == 0.0


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        ([0], Layout(1, 1)),
        ([0, 1, 2], Layout(1, 3)),
        ([0, 1, 0, 1], Layout(2, 2)),
        ([0, 0, 1, 1], Layout(2, 2)),
        ([0, 1, 0], Layout(3, 1)),  # two hosts, unevenly: one ring
    ],
)
def test_layouts(local_ranks: list[int], expected: Layout) -> None:
    assert Layout.of(local_ranks) == expected


def test_hosts_are_filled_in_turn() -> None:
    filled = [Layout.filled(n, 4) for n in (1, 2, 4, 8, 6)]
    assert filled == [Layout(1, 1), Layout(1, 2), Layout(1, 4), Layout(2, 4), Layout(6, 1)]


@given(
    start=st.floats(1e-4, 1e-2),
    alpha=st.floats(1e-5, 1e-3),
    beta=st.floats(1e-10, 1e-8),
    local_beta=st.floats(1e-10, 1e-8),
    locals=st.sampled_from([1, 2, 4]),
)
def test_a_fit_recovers_exact_numbers(start: float, alpha: float, beta: float, local_beta: float, locals: int) -> None:
    layouts = [Layout(1, 2), *(Layout(hosts, locals) for hosts in (2, 4))]
    found = fit(_points(Fit(start, alpha, beta, 0.0, local_beta), layouts), with_start=True)
    assert found is not None
    assert (found.start, found.alpha, found.beta, found.local_beta) == pytest.approx(
        (start, alpha, beta, local_beta), rel=1e-4, abs=1e-13
    )
    assert found.largest_error < 1e-5


@pytest.mark.parametrize(
    ("layouts", "unknown"),
    [
        ([Layout(1, 2)], ("beta", "alpha", "local_alpha")),
        ([Layout(1, 2), Layout(1, 4)], ("beta", "alpha")),
        ([Layout(2, 1)], ("alpha", "local_beta", "local_alpha")),
        ([Layout(2, 1), Layout(4, 1)], ("local_beta", "local_alpha")),
        ([Layout(1, 2), Layout(2, 2)], ("local_alpha",)),
        ([Layout(2, 2)], ("alpha", "local_beta", "local_alpha")),
        ([Layout(1, 2), Layout(1, 4), Layout(2, 4)], ()),
    ],
)
def test_a_fit_knows_what_its_layouts_cannot_tell(layouts: list[Layout], unknown: tuple[str, ...]) -> None:
    truth = Fit(start=5e-3, alpha=1e-5, beta=3e-9, local_alpha=1e-6, local_beta=1e-9)
    found = fit(_points(truth, layouts), with_start=True)
    assert found is not None and found.unknown == unknown
    assert all(getattr(found, name) == 0.0 for name in unknown)
    for layout in layouts:
        assert found.seconds(layout, 10**6) == pytest.approx(truth.seconds(layout, 10**6), rel=1e-6)
    of_mpi = fit(_points(replace(truth, start=0.0), layouts), with_start=False)
    assert of_mpi is not None and of_mpi.start == 0.0 and "start" not in of_mpi.unknown
    shown = tables._fit(found)
    assert ("alpha 10.0 us" in shown) == ("alpha" not in unknown)
    assert ("within a host" in shown) == ("local_beta" not in unknown)


def test_short_messages_take_another_way_and_are_not_fitted() -> None:
    truth = Fit(start=1e-3, alpha=1e-5, beta=1e-9)
    short = [Point(layout, size, 1.0) for layout in LINK for size in (4, 64, 1024)]
    assert fit([*short, *_points(truth, LINK)], with_start=True) == fit(_points(truth, LINK), with_start=True)
    alone = fit(short, with_start=True)  # where there is nothing else
    assert alone is not None and alone.start == pytest.approx(1.0)


@pytest.mark.parametrize("noise", [0.2, 0.5, 1.0])
@pytest.mark.parametrize(
    ("layouts", "truth"), [(LINK, Fit(1e-4, 2e-5, 1e-9)), ([Layout(1, 2)], Fit(3e-4, 0.0, 0.0, 0.0, 1e-9))]
)
def test_noise_makes_a_network_neither_faster_nor_slower(layouts: list[Layout], truth: Fit, noise: float) -> None:
    """Times that are twice as long as often as they are half as long, and more; 120 of them for each layout."""
    draw = np.random.default_rng(0)
    points = _points(truth, [layout for layout in layouts for _ in range(20)])
    noisy = [replace(point, seconds=point.seconds * float(np.exp(noise * draw.normal()))) for point in points]
    found = fit(noisy, with_start=True)
    assert found is not None
    assert ("FITS BADLY" in tables._fit(found)) == (noise > 0.8)
    for layout in layouts:
        for size in (2**16, 2**22):
            within = pytest.approx(truth.seconds(layout, size), rel=0.15 * max(1, noise / 0.5))
            assert found.seconds(layout, size) == within


def test_a_fit_has_no_number_below_zero() -> None:
    # Faster with more ranks and with more bytes: the free solution has a negative alpha and beta.
    times = [3.0, 2.9, 2.0, 1.9]
    places = [(2, 10**5), (2, 2 * 10**5), (4, 10**5), (4, 2 * 10**5)]
    found = fit([Point(Layout(n, 1), size, t) for (n, size), t in zip(places, times, strict=True)], with_start=True)
    assert found is not None
    assert found.alpha == found.beta == 0.0
    # Of logarithms the best constant is the geometric mean.
    assert found.start == pytest.approx(np.exp(np.log(times).mean()))
    assert found.errors == pytest.approx(sorted(abs(found.start / t - 1) for t in times))
    assert fit([Point(Layout(1, 1), 4, 1.0), Point(Layout(1, 1), 8, 1.0)], with_start=True) is None
    assert fit([Point(Layout(2, 1), 4, 1.0), Point(Layout(4, 1), 4, 2.0)], with_start=True) is None  # of one size


# 1 s forward, 2 s backward, 1 s update, as PHASES.
LIKE = Measured(
    layout=Layout(2, 1),
    mean=4.0,
    backward=Backward(1.0, (0.5, 1.0, 1.5, 2.0), (100, 100, 100, 100)),
    update=1.0,
    efficiency=0.9,
    standard_error=None,
)
STEP = _step(4.0, {1: 1.0, 2: 0.9}, PHASES)


def _one(fit: Fit, ranks: int, buckets: Any = None, like: Measured = LIKE, **network: Any) -> Prediction:
    return predict_one(STEP, Network(fit, **network), Layout(ranks, 1), like, buckets)


def test_prediction_limits() -> None:
    free = _one(Fit(), 512, "auto")
    assert (free.efficiency, free.efficiency_in_one_message, free.bucket_bytes) == (1.0, 1.0, None)
    alone = _one(Fit(1.0, 1.0, 1.0), 1, "auto")
    assert (alone.efficiency, alone.efficiency_in_one_message) == (1.0, 1.0)
    # Bandwidth alone: with many ranks an all-reduce takes 2 S beta, whatever their number.
    narrow = _one(Fit(beta=0.01), 100_000)
    assert narrow.communication_seconds == pytest.approx(2 * 400 * 0.01, rel=1e-4)
    assert narrow.efficiency == pytest.approx(4 / 12, rel=1e-4)
    # Latency alone grows with the ranks, and so does what is lost.
    slow = [_one(Fit(alpha=0.001), p).efficiency for p in (2, 16, 512)]
    assert slow == pytest.approx([4 / (4 + 2 * (p - 1) * 0.001) for p in (2, 16, 512)])


def test_buckets_hide_all_but_the_last_gradients() -> None:
    # 2 ranks: 100 bytes take 0.2 s. Each is done before the next is ready; the last ends 0.2 s after the backward pass.
    found = _one(Fit(beta=0.002), 2, 100)
    assert found.efficiency_in_one_message == pytest.approx(4 / 4.8)
    assert found.efficiency == pytest.approx(4 / 4.2) and found.bucket_bytes == 100
    # The processor's part of it delays the backward pass: 4 x 0.05 s.
    busy = _one(Fit(beta=0.002), 2, 100, processor=Fit(beta=0.0005))
    assert busy.efficiency == pytest.approx(4 / (4.2 + 0.2)) and busy.step_seconds == pytest.approx(4.4)
    # What a run would choose: buckets over a network, one message within a host.
    like = replace(LIKE, backward=replace(LIKE.backward, sizes=(10**6,) * 4))
    slow = Network(Fit(beta=2e-7, local_beta=2e-7))
    assert predict_one(STEP, slow, Layout(2, 1), like, "auto").bucket_bytes is not None
    assert predict_one(STEP, slow, Layout(1, 2), like, "auto").bucket_bytes is None
    on_gpus = STEP.model_copy(update={"facts": FACTS.model_copy(update={"device": "/GPU:0"})})
    assert predict_one(on_gpus, slow, Layout(1, 2), like, "auto").bucket_bytes is not None
    # What the step was given holds for the prediction.
    for options, expected in (
        ({"overlap": "off"}, None),
        ({"overlap": "on", "given_bucket_bytes": 10}, 10),
        ({"given_bucket_bytes": 10**6}, 10**6),
    ):
        assert predict_one(STEP.model_copy(update=options), slow, Layout(2, 1), like, "auto").bucket_bytes == expected
    always = STEP.model_copy(update={"overlap": "on"})
    assert predict_one(always, Network(Fit()), Layout(2, 1), like, "auto").bucket_bytes is not None
    # The loss scale looks at all gradients.
    scaled = STEP.model_copy(update={"precision": "mixed_float16"})
    assert predict_one(scaled, slow, Layout(2, 1), like, "auto").bucket_bytes is None


def test_ranks_wait_for_the_slowest() -> None:
    found = predict(_step(4.0, {1: 1.0, 2: 0.9}, PHASES, lag=1.25), _allreduce(Fit(beta=0.002), [2]), [2, 1])
    assert found.predictions[0].efficiency_in_one_message == pytest.approx(4 / (5 + 0.8))
    assert found.predictions[1].efficiency == 1.0


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
    times = [(c.efficiency_in_one_message, c.communication_seconds) for c in (*found.checks, found.predictions[1])]
    assert [e for e, _ in times] == pytest.approx([s / (s + t) for s, (_, t) in zip((4, 2, 4, 2), times, strict=True)])
    assert [(c.ranks, c.measured_on, c.measured) for c in found.checks] == [(2, 2, 0.8), (4, 4, 0.7), (4, 2, 0.7)]
    assert found.predictions[1].measured_on == 4 and found.predictions[1].hosts == 64
    assert found.checks[2].error == pytest.approx(found.checks[2].efficiency / 0.7 - 1)
    assert json.loads(found.model_dump_json())["checks"][2]["error"] == found.checks[2].error
    # Two ranks alone cannot tell alpha: its two messages count as the start; four ranks send six.
    assert found.checks[2].communication_seconds == pytest.approx(measured.seconds(Layout(4, 1), 400) - 4 * 0.01)
    assert found.checks[0].communication_seconds == pytest.approx(measured.seconds(Layout(2, 1), 400))
    assert found.predictions[1].communication_seconds == pytest.approx(
        Fit(0.001, 0.5, 0.01).seconds(Layout(64, 1), 400)
    )
    # Eight ranks a host send what eight hosts send.
    of_eight = predict(step, _allreduce(measured, [2, 4]), [64], ranks_per_host=8).predictions[0]
    assert of_eight.hosts == 8
    assert of_eight.communication_seconds == pytest.approx(measured.seconds(Layout(8, 8), 400))
    # The last of three hosts has two: all form one ring.
    (uneven,) = predict(step, _allreduce(measured, [2, 4]), [18], ranks_per_host=8).predictions
    assert (uneven.ranks, uneven.hosts) == (18, 3)
    assert uneven.communication_seconds == pytest.approx(measured.seconds(Layout(18, 1), 400))
    plain = predict(step, _allreduce(measured, [2, 4]), [2])
    assert plain.link_fit == measured
    assert plain.predictions[0].communication_seconds == plain.checks[0].communication_seconds
    shown = tables.of_predict(found)
    assert f"{found.checks[0].efficiency / 0.8 - 1:+.1%}" in shown and "0.7" in shown
    # The buckets of a check are those that were measured.
    bucketed = predict(step.model_copy(update={"bucket_bytes": 100}), _allreduce(measured, [2, 4]), [2])
    assert {check.bucket_bytes for check in bucketed.checks} == {100}
    # The processor's work delays the backward pass, but not that of a GPU.
    busy = bucketed.model_copy(update={"allreduce": _allreduce(measured, [2, 4], work=1.0)})
    on_cpu = predict(busy.step, busy.allreduce, [2]).checks[0]
    facts = step.facts.model_copy(update={"device": "/GPU:0"})
    on_gpu = predict(busy.step.model_copy(update={"facts": facts}), busy.allreduce, [2]).checks[0]
    assert on_cpu.efficiency < on_gpu.efficiency == bucketed.checks[0].efficiency
    # Nothing is checked "as a prediction is made" where no all-reduce was measured on the fewest ranks.
    of_four = predict(step, _allreduce(measured, [4, 8]), [2])
    assert [(c.ranks, c.measured_on) for c in of_four.checks] == [(2, 2), (4, 4)]
    with pytest.raises(UserError, match="no fit for Horovod"):
        predict(step, _allreduce(measured, [2, 4]).model_copy(update={"fits": {}}), [2])


def test_what_lies_beyond_the_measurements_is_told() -> None:
    whole, few = (
        _allreduce(Fit(0.001, 0.01, 0.001), [2, 4]),
        _allreduce(Fit(0.001, 0.0, 0.001, unknown=("alpha",)), [2]),
    )
    local = _allreduce(Fit(0.001, 0.0, 0.0, 0.0, 0.001, unknown=("beta", "alpha")), [2])
    apart = _allreduce(Fit(0.001, 0.01, 0.001, unknown=("local_beta", "local_alpha")), [2, 4])
    for allreduce, options, said in (
        (whole, {}, None),
        (few, {}, "ALPHA IS NOT KNOWN from all-reduces on one number of hosts"),
        (few, {"latency": 0.5}, None),
        (local, {}, "THE LINK IS NOT KNOWN from all-reduces on one host"),
        (local, {"link": 10.0}, "ALPHA IS NOT KNOWN"),
        (local, {"link": 10.0, "latency": 0.5}, None),
        (local, {"ranks_per_host": 64}, None),
        (apart, {"ranks_per_host": 1}, None),
        (apart, {"ranks_per_host": 8}, "A HOST'S INSIDE IS NOT KNOWN from all-reduces of one rank on each host"),
    ):
        shown = tables.of_predict(predict(STEP, allreduce, [2, 64], **options))
        assert ("NOT KNOWN" in shown) == (said is not None) and (said or "") in shown, (options, shown)
        assert "ARE LONGER" not in shown
    long = STEP.model_copy(update={"messages": [2**30]})
    assert "GRADIENTS ARE LONGER than" in tables.of_predict(predict(long, whole, [2]))


def test_an_emulated_step_is_predicted_by_its_sleep(tmp_path: Path) -> None:
    world = EmulatedWorld(
        ranks=2,
        step_seconds=_estimate(5.0),
        alone_seconds=_estimate(4.0),
        rest_seconds=_estimate(1.0),
        message_seconds=_estimate(1.0),
        value_seconds=_estimate(0.1),
        ring_seconds=None,
        step_processor=_estimate(0.1),
        alone_processor=_estimate(0.1),
        sent_bytes=0.0,
        sent_packets=0.0,
    )
    emulated = EmulatedResult(
        facts=_facts_of(2),
        model="resnet20",
        gradients=[100, 300],
        bucket_bytes=100,
        emulated_seconds=3.0,
        steps=1,
        worlds=[world],
        memory_by_rank=[],
    )
    write(tmp_path / "e.json", emulated)
    assert read(StepResult | EmulatedResult, tmp_path / "e.json", "--step") == emulated
    found = predict(emulated, _allreduce(Fit(beta=0.01), [2], work=1.0), [2]).checks[0]
    # 100 bytes are ready after a quarter of the sleep, and take 1 s; the rest takes 3 s after its end. Then the update.
    assert found.step_seconds == pytest.approx(3 + 3 + 1)
    assert found.measured == 0.8 and found.efficiency == pytest.approx(4 / 7)
    predicted = predict(emulated, _allreduce(Fit(beta=0.01), [2], work=1.0), [4]).predictions[0]
    assert predicted.bucket_bytes == 100  # as given: an emulated step chooses none


def test_hosts_are_counted_by_local_ranks_since_two_may_share_a_name() -> None:
    step = _step(4.0, {1: 1.0, 2: 0.8}, PHASES)
    twins = FACTS.model_copy(update={"hosts": ["a"] * 4, "local_ranks": [0, 0, 1, 0]})
    assert "4 ranks on 3 hosts, made up" in tables.of_step(step.model_copy(update={"facts": twins}))


def test_a_prediction_from_two_machines_says_so() -> None:
    step, allreduce = STEP, _allreduce(Fit(0.001, 0.01, 0.001), [2])
    assert "THE TWO MEASUREMENTS DIFFER" not in tables.of_predict(predict(step, allreduce, [2]))
    elsewhere = allreduce.model_copy(
        update={"facts": allreduce.facts.model_copy(update={"hosts": ["x", "y"], "controller": "gloo"})}
    )
    found = predict(step, elsewhere, [2])
    assert "THE TWO MEASUREMENTS DIFFER (hosts, controller)" in tables.of_predict(found)


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


def test_messages_of_a_compression() -> None:
    import keras

    from hvd_cifar.tools.benchmark.step import messages_of

    shapes = [(3, 3, 16, 32), (32,), (2, 2)]
    variables = [keras.Variable(np.zeros(shape), dtype="float32") for shape in shapes]
    values = 3 * 3 * 16 * 32 + 32 + 4
    assert messages_of(variables, "none") == [values * 4]
    assert messages_of(variables, "fp16") == [values * 2]


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


def test_uses_of_examples_are_counted_and_the_slowest_rank_ends_an_epoch() -> None:
    from hvd_cifar.tools.benchmark.feeding import Turn, result_of

    def turn(seconds: float, *examples: int) -> Turn:
        return Turn(seconds, processor=3 * seconds, held=1000 * len(examples), examples=np.array(examples))

    first = [turn(0.5, 0, 1, 1), turn(1.0, 1, 2)]
    last = [turn(0.25, 3, 3), turn(0.1, 0, 1, 2)]
    found = result_of("drawn", [first, last], 6)
    assert found.images_per_second.mean == pytest.approx((5 / 1 + 5 / 0.25) / 2)
    assert [e.mean for e in found.processor_seconds_by_rank] == pytest.approx([(300 + 150) / 2, (600 + 60) / 2])
    assert found.processor_seconds.mean == pytest.approx(900 / 2 + 210 / 2)
    assert found.held_by_rank == [3000, 3000]
    assert found.ranks_of_first == [[1], [1], [1], [0, 0], [], []]
    one, other = found.epochs
    # Of the first epoch: 0 and 2 once, 1 three times and by both ranks; 3, 4 and 5 never.
    assert (one.never, one.once, one.more, one.by_ranks) == (3, 2, 1, [3, 2, 1])
    assert (one.uses_by_rank, one.different_by_rank) == ([3, 2], [2, 2])
    # Of the last: 3 twice, by one rank.
    assert (other.never, other.once, other.more, other.by_ranks) == (2, 3, 1, [2, 4, 0])
    assert (other.uses_by_rank, other.different_by_rank) == ([2, 3], [1, 3])

    result = InputResult(
        facts=FACTS.model_copy(update={"hosts": ["a", "a"], "local_ranks": [0, 1]}),
        model="tutorial",
        dataset="six",
        examples=6,
        per_rank_batch_size=2,
        image_shape=[24, 24, 3],
        memory_by_rank=[Memory(resident=2**30, proportional=2**29), Memory(resident=2**29, proportional=None)],
        ways=[found],
    )
    lines = [" ".join(line.split()) for line in tables.of_input(result).splitlines()]
    # Means of both epochs: never 3 and 2 of 6, once 2 and 3, more 1 and 1; by one rank 2 and 4, by several 1 and 0.
    assert "drawn 2 (41.7%) 2 (41.7%) 1 (16.7%) 3 (50.0%) 0 (8.3%)" in lines
    assert any("N = 2 ranks: (1 - 1/N)^N = 25.00%" in line for line in lines)
    assert any("1,024 MiB, PSS 512" in line for line in lines)


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
    spoilt = [p.model_copy(update={"wrong_values": 3 * (p.bytes == 2**16)}) for p in fine.points]
    with pytest.raises(TrainingError, match="3 values of an all-reduce of 65,536 bytes"):
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
    with pytest.raises(SystemExit) as ended:
        cli.main(["benchmark", "predict", *files, "--model", "fast"])
    assert ended.value.code == 2 and "--model has no effect with --step FILE" in capfd.readouterr().err
    assert [p["ranks"] for p in found["predictions"]] == [2, 64]
    assert found["link_fit"]["beta"] == 1e-3 and found["allreduce"]["fits"]["horovod"]["beta"] == 1e-4
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_report_draws_results(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    step, allreduce = _step(4.0, {1: 1.0, 2: 0.9}, PHASES), _allreduce(Fit(0.001, 1e-5, 1e-4), [2, 4])
    found = {"s": step, "a": allreduce, "p": predict(step, allreduce, (2, 64), None, None, None)}
    for name, result in found.items():
        write(tmp_path / f"{name}.json", result)
    files = ",".join(str(tmp_path / f"{name}.json") for name in found)
    run_dir = write_run(tmp_path / "run")
    for words, code in ((["--benchmarks", files], 0), (["--benchmarks", str(run_dir / "config.json")], 2)):
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", str(run_dir), *words])
        assert ended.value.code == code, capfd.readouterr().err
    text = (run_dir / "report.html").read_text()
    for title in ("Speed and scaling efficiency", "Parts of a step", "bus bandwidth", "Scaling efficiency", "90%"):
        assert title in text
    assert "config.json: is no result of `benchmark step`" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.json", None, "No such file"),
        ("text.json", "{", "is no result of `benchmark step`"),
        ("other.json", '{"benchmark": "allreduce"}', "is no result of `benchmark step` or `benchmark emulated step`;"),
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
    places = tmp_path, tmp_path / "none" / "x.png", Path("/proc/x"), Path("/dev/null"), Path("/dev/stdout")
    for option, place in zip(cycle(["--json", "--plot"]), (*places, tmp_path / ("x" * 251)), strict=False):
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
    shown = tables.of_step(step.model_copy(update={"worlds": [step.worlds[0], last]}))
    assert "h39" in shown and "h24" in shown and "h23" not in shown
    assert "16 slowest ranks of 40" in shown
