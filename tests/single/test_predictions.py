"""The benchmarks of predictions: their arithmetic, and the nets of large clusters."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import large_clusters, nets, predictions
from hvd_cifar.distributed.overlap import choose
from hvd_cifar.tools.benchmark.fits import Layout
from hvd_cifar.tools.benchmark.results import EmulatedResult, EmulatedWorld, Estimate, Prediction


def test_a_prediction_stands_beside_its_measurement() -> None:
    rows = [
        predictions.Row(4, 8, 0.11, 0.1, "in one message"),
        predictions.Row(2, 8, 0.05, 0.1, "in one message", sent=1.05e6, least=1e6),
    ]
    shown = predictions.table(rows).splitlines()
    assert len({line.count("|") for line in shown}) == 1
    assert shown[-2] == "| 4 | 8 | 110.0 | 100.0 | +10.0% | in one message |  |"
    assert shown[-1] == "| 2 | 8 | 50.0 | 100.0 | -50.0% | in one message | 1.05, +5.0% |"


def test_bytes_of_an_emulated_step_stand_beside_the_least_of_that_number_of_hosts() -> None:
    world = EmulatedWorld.model_construct(ranks=8, step_seconds=Estimate.of([0.1]), sent_bytes=1.6e6)
    found = EmulatedResult.model_construct(worlds=[world], gradients=[400_000, 600_000])
    predicted = Prediction.model_construct(ranks=8, step_seconds=0.11)
    rows = [predictions.Row.of(hosts, predicted, "", found) for hosts in (2, 4)]
    assert [(row.measured, row.sent, row.least) for row in rows] == [(0.1, 1.6e6, 1.0e6), (0.1, 1.6e6, 1.5e6)]


@pytest.mark.parametrize("hosts", ["1", "2,x", ""])
def test_numbers_of_hosts_are_checked(hosts: str) -> None:
    done = CliRunner().invoke(predictions.main, ["--hosts", hosts])
    assert done.exit_code == 2 and f"--hosts {hosts}: not numbers from 2 on" in done.output


def test_gradients_get_ready_from_the_last_layer_on_by_their_multiplications() -> None:
    found = large_clusters.backward_of(nets.build("tutorial", 24).model, 24, 3.0)
    assert sum(found.sizes) == 4 * 1_068_298
    assert found.before == 1.0 and found.ready[-1] == pytest.approx(2.0)
    assert found.sizes[:2] == (4 * 10, 4 * 192 * 10)  # softmax's bias and kernel
    # conv1 with 24 x 24 x (5 x 5 x 3 x 64), conv2 with 12 x 12 x (5 x 5 x 64 x 64), and the three dense layers.
    first, others = 24 * 24 * 4800, 12 * 12 * 102_400 + 6 * 6 * 64 * 384 + 384 * 192 + 192 * 10
    assert found.ready[-3] == pytest.approx(2.0 * others / (first + others))


def test_more_ranks_are_never_predicted_to_be_more_efficient() -> None:
    backward = large_clusters.backward_of(nets.build("resnet20").model, 32, 0.02)
    network = large_clusters.network(1e-3, 0.75, large_clusters.NVLINK)
    seconds = [choose(backward, network.link(Layout.filled(8 * 2**n, 8))).seconds for n in range(8)]
    assert seconds == sorted(seconds) and seconds[0] > backward.seconds
