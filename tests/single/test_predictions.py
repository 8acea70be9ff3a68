"""benchmarks.predict: the fit on made-up all-reduces, and predictions whose answer is known exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.predict import Fit, Layout, Network, Point, fit, main, predict
from hvd_cifar.errors import UserError
from hvd_cifar.tools.benchmark.results import write
from tests.benchmark_results import allreduce_result, step_result

SIZES = [2**14 * 4**i for i in range(6)]
TRUTH = Fit(beta=1e-9, start=1e-4, alpha=2e-5, local_beta=3e-10, local_alpha=1e-6)
STEP = step_result(4.0, {1: 1.0, 2: 0.9})


def _points(truth: Fit, layouts: list[Layout]) -> list[Point]:
    return [Point(layout, size, truth.seconds(layout, size)) for layout in layouts for size in SIZES]


@pytest.mark.parametrize(
    ("layouts", "unknown"),
    [
        ([Layout(1, 2)], ("beta", "alpha", "local_alpha")),
        ([Layout(2, 1)], ("alpha", "local_beta", "local_alpha")),
        ([Layout(2, 1), Layout(4, 1)], ("local_beta", "local_alpha")),
        ([Layout(1, 2), Layout(1, 4), Layout(2, 4), Layout(4, 4)], ()),
    ],
)
def test_a_fit_recovers_the_numbers_that_its_layouts_determine(layouts: list[Layout], unknown: tuple[str, ...]) -> None:
    found, missing = fit(_points(TRUTH, layouts))
    assert missing == unknown and all(getattr(found, name) == 0.0 for name in unknown)
    for layout in layouts:
        assert found.seconds(layout, 10**6) == pytest.approx(TRUTH.seconds(layout, 10**6), rel=1e-6)
    if not unknown:
        assert found == pytest.approx(TRUTH, rel=1e-4)


def test_a_fit_has_no_number_below_zero_and_takes_two_sizes() -> None:
    times, places = [3.0, 2.9, 2.0, 1.9], [(2, 10**5), (2, 2 * 10**5), (4, 10**5), (4, 2 * 10**5)]
    found, _ = fit([Point(Layout(n, 1), size, t) for (n, size), t in zip(places, times, strict=True)])
    assert found.alpha == found.beta == 0.0 and 1.9 < found.start < 3.0  # faster with more ranks and more bytes
    with pytest.raises(UserError, match="fewer than two sizes"):
        fit([Point(Layout(2, 1), 2**20, 1.0)])


def test_predictions() -> None:
    free, like = Network(Fit(), Fit()), STEP.worlds[1]
    assert predict(STEP, free, Layout(512, 1), like).efficiency == 1.0
    assert predict(STEP, free._replace(wall=TRUTH), Layout(1, 1), like).efficiency == 1.0
    # Latency alone grows with the ranks: 2 (n - 1) hops.
    slow = Network(Fit(alpha=0.001), Fit())
    assert predict(STEP, slow, Layout(16, 1), like, measured=True).efficiency == pytest.approx(4 / 4.03)
    # Two ranks: 100 bytes take 0.2 s, and each bucket but the last is hidden. Not in one message.
    narrow = Network(Fit(beta=0.002), Fit())
    assert predict(STEP, narrow, Layout(2, 1), like, measured=True).efficiency == pytest.approx(4 / 4.8)
    bucketed = STEP.model_copy(update={"bucket_bytes": 100})
    assert predict(bucketed, narrow, Layout(2, 1), like, measured=True).seconds == pytest.approx(4.2)
    # The processor's part delays backward: 4 x 0.05 s. Ranks wait for the slowest one, which takes 5 s.
    busy = narrow._replace(processor=Fit(beta=0.0005))
    assert predict(bucketed, busy, Layout(2, 1), like, measured=True).seconds == pytest.approx(4.4)
    lagging = step_result(4.0, {2: 0.9}, lag=1.25)
    assert predict(lagging, free, Layout(2, 1), lagging.worlds[0]).efficiency == pytest.approx(4 / 5)


def test_it_prints_checks_and_predictions(tmp_path: Path) -> None:
    write(tmp_path / "s.json", STEP)
    write(tmp_path / "a.json", allreduce_result([2], lambda n, size: 0.001 + 1e-3 * size))
    words = ["--step", str(tmp_path / "s.json"), "--allreduce", str(tmp_path / "a.json"), "--ranks", "2,64"]
    done = CliRunner().invoke(main, words)
    check, two, _ = [line for line in done.output.splitlines() if line.startswith(("| 2 ", "| 64 "))]
    # 400 bytes take 0.401 s in one message.
    assert "| 0.909 | 0.900 | +1.0% |" in check and "| 0.909 |" in two, done.output
    assert "NOT DETERMINED by these all-reduces, and taken as 0: alpha" in done.output
    slow = CliRunner().invoke(main, [*words, "--latency-us", "1e6"])
    assert "0: local_beta" in slow.output and slow.output != done.output
    wrong = CliRunner().invoke(main, [*words[:2], "--allreduce", str(tmp_path / "s.json")])
    assert wrong.exit_code == 2 and "is no result of `benchmark allreduce`" in wrong.output
