"""Sums in a fixed order, and runs that end with the same bits on other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.options import FEW, RESNET8, SMALL_NET
from tests.ranks import run_ranks

SHARDS = 4
TERMS = 8  # of a sum
Train = Callable[..., tuple[str, ...]]
AVERAGED = {"ema_decay": 0.9, "test_time_augmentation": False}


def _terms(count: int) -> Any:
    """float32 numbers of very different size: any other order of addition shows."""
    draw = np.random.default_rng(3)
    return (draw.normal(size=(count, 1001)) * 10.0 ** draw.uniform(-4, 4, (count, 1001))).astype(np.float32)


def _sums_in_tree() -> dict[str, list[float]]:
    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.distributed.reduction import add_in_tree, all_reduce_in_tree
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import tensorflow as tf

    each = TERMS // world.size if TERMS % world.size == 0 else 1
    terms = _terms(each * world.size)[world.rank * each : (world.rank + 1) * each]
    own = add_in_tree((tf.constant(term) for term in terms), tf.add)
    in_graph = tf.function(lambda: all_reduce_in_tree(own))()
    variable = keras.Variable(np.zeros(1001, "float32"))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", fixed_order=True)
    optimizer.apply([-own], [variable])
    return {
        "eager": all_reduce_in_tree(own).numpy().tolist(),
        "graph": in_graph.numpy().tolist(),
        "optimizer": variable.numpy().tolist(),
    }


@pytest.mark.parametrize("n", [2, 3])
def test_a_sum_over_ranks_is_added_in_the_order_of_the_ranks(n: int) -> None:
    terms = list(_terms(TERMS if TERMS % n == 0 else n))
    while len(terms) > 1:  # by hand: neighbours, level by level
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[len(pairs) * 2 :]
    for found in run_ranks(_sums_in_tree, n):
        for way, values in found.items():
            assert (np.array(values, np.float32) == terms[0]).all(), way
    if TERMS % n == 0:  # three terms have but one order of neighbours
        assert (np.add.reduce(_terms(TERMS), axis=0) != terms[0]).any()


def _train(folder: str, runs: list[tuple[str, dict[str, Any]]], threads: int) -> list[str]:
    """Runs in one start of the ranks, to a checkpoint; the digest of the state after each."""
    import hvd_cifar
    from hvd_cifar.distributed.collectives import digest

    ended: list[str] = []

    class Ends(hvd_cifar.Callback):
        def on_end(self, run: Any) -> None:
            ended.append(digest(run.state.replicated(with_own=True)))

    common = {"model": "tutorial", "dataset": FEW, "seed": 3, "eval_every": 0, "set": AVERAGED}
    common |= {"threads_per_rank": threads, "callbacks": [Ends()]}
    for name, options in runs:
        hvd_cifar.train(**{**common, **options, "run_dir": f"{folder}/{name}"})
    return ended


def _virtual(model: str, steps: int) -> dict[str, Any]:
    """26 examples are no multiple of 4: two shards have 7 of them, two have 6."""
    return {"model": model, "global_batch_size": 26, "max_steps": steps, "virtual_shards": SHARDS}


IN_BUCKETS = {"overlap": "on", "bucket_bytes": 20_001}


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """Runs on n ranks: the digests of their ends, which are the same on all ranks."""

    def digests(n: int, *runs: tuple[str, dict[str, Any]], threads: int = 1) -> tuple[str, ...]:
        how: dict[str, Any] = {"deterministic": True} if threads == 1 else {"fresh": True}
        ended = {tuple(found) for found in run_ranks(_train, n, str(tmp_path), runs, threads, timeout=300, **how)}
        assert len(ended) == 1
        return ended.pop()

    return digests


@pytest.mark.parametrize("most", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_virtual_shards_end_with_the_same_bits_on_any_number_of_ranks(most: int, train: Train) -> None:
    """Weights, momentum, moving averages, batch norm's statistics; the run continues on half as many ranks."""
    (early,) = train(most, ("cut", _virtual(RESNET8, 2) | IN_BUCKETS))
    (alone,) = train(1, ("alone", _virtual(RESNET8, 4)))
    assert train(most // 2, ("cut", _virtual(RESNET8, 4))) == (alone,)
    assert early != alone


@pytest.mark.slow
def test_virtual_shards_of_other_nets_end_with_the_same_bits_on_1_and_2_ranks(train: Train) -> None:
    """Convolutions as products of matrices, with more parts of a batch than images, and layers by XLA."""
    nets = "tutorial", "fast"
    alone = train(1, *((f"1 {net}", _virtual(net, 4)) for net in nets))
    assert train(2, *((f"2 {net}", _virtual(net, 4) | IN_BUCKETS) for net in nets)) == alone


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_deterministic_runs_repeat_to_the_bit(threads: int, train: Train) -> None:
    """The second run sends its gradients in buckets."""
    run = {"model": SMALL_NET if threads == 1 else "tutorial", "batch_size": 7, "max_steps": 5, "deterministic": True}
    one, other = train(3, ("plain", run), ("in buckets", run | {"overlap": "on"}), threads=threads)
    assert one == other
