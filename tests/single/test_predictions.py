"""The benchmarks of predictions: their arithmetic, and the nets of large clusters."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from benchmarks import large_clusters, nets, predictions
from hvd_cifar.distributed.overlap import choose
from hvd_cifar.tools.benchmark.fits import Layout


def test_a_prediction_stands_beside_its_measurement() -> None:
    shown = predictions.table([(4, 8, 0.11, 0.1, "in one message")]).splitlines()[-1]
    assert shown == "| 4 | 8 | 110.0 | 100.0 | +10.0% | in one message |"


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
