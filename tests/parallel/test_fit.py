"""`distributed.fit` on ranks with shards of their own: what one process finds, and the same on every rank."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import horovod_nets as nets
from tests.ranks import Jobs, run_all


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    functions = {"shards": _shards, "stops": _stops, "together": _together}
    return cache(lambda n: run_all(functions, n))


def _shards() -> dict[str, Any]:
    """Loss, metrics and outputs over all examples, by the ranks together and by one process, by number of examples."""
    nets.start()
    import keras

    from hvd_cifar.distributed import fit

    found = {}
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, "tanh")(inputs)
    model = keras.Model(inputs, {"class": keras.layers.Dense(1, "sigmoid", name="class")(hidden), "hidden": hidden})
    kinds = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision"), "accuracy"]
    model.set_weights([np.linspace(-1, 1, w.size).reshape(w.shape) for w in model.get_weights()])
    scored = keras.Model(inputs, model.output["class"])
    scored.compile("sgd", loss="binary_crossentropy", metrics=kinds, weighted_metrics=["mae"])
    draw = np.random.default_rng(1)
    for count in (2, 41):  # fewer examples than three ranks; a last batch that is not full
        x, y = draw.normal(size=(count, 3)).astype("float32"), draw.integers(0, 2, (count, 1)).astype("float32")
        weight = draw.uniform(size=count).astype("float32")
        alone = scored.evaluate(x, y, batch_size=count, sample_weight=weight, return_dict=True, verbose=0)
        outputs = model.predict(x, verbose=0)
        together = fit.evaluate(scored, x, y, weight, batch_size=4)
        found[str(count)] = {
            "metrics": [sorted(together.items()), sorted(alone.items())],
            "outputs": [[v.tolist() for v in out.values()] for out in (fit.predict(model, x, batch_size=4), outputs)],
        }
    return found


@pytest.mark.parametrize("n", [1, 2, 3])
def test_evaluate_and_predict_over_shards_are_those_of_one_process(n: int, jobs: Jobs) -> None:
    for rank in jobs(n)["shards"]:
        for count, found in rank.items():
            (together, alone), (outputs, expected) = found["metrics"], found["outputs"]
            assert [name for name, _ in together] == [name for name, _ in alone] and len(alone) == 5
            for (name, value), (_, other) in zip(together, alone, strict=True):
                assert value == pytest.approx(other, rel=1e-5), (count, name)
            for one, other in zip(outputs, expected, strict=True):
                assert np.allclose(one, other, atol=1e-6) and len(other) == int(count)


def _stops() -> list[Any]:
    """Epochs before early stopping, where ranks by themselves would stop at others."""
    hvd = nets.start()
    import keras

    from hvd_cifar.distributed import fit

    model = nets.net()
    model.compile(keras.optimizers.SGD(0.0), loss="mse")
    stopping = fit.EarlyStopping("measured", patience=1, mode="min")
    by_rank = [[3.0, 3.0, 3.0, 3.0], [3.0, 2.0, 1.0, 1.0]]  # of rank 0, and of all others
    values = by_rank[min(hvd.rank(), 1)]
    report = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(measured=values[epoch]))
    x, y = nets.data()
    history = model.fit(x[0], y[0], epochs=4, callbacks=[report, stopping], verbose=0)
    return [len(history.epoch), stopping.stopped_epoch]


def test_ranks_stop_after_the_same_epoch(jobs: Jobs) -> None:
    assert jobs(1)["stops"] == [[2, 1]]
    assert jobs(3)["stops"] == [[4, 3]] * 3


def _together() -> list[Any]:
    """Weights of ranks with other numbers of batches, weighted by examples, beside those of one process on all."""
    hvd = nets.start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer
    from hvd_cifar.distributed.collectives import all_reduce_in_graph
    from hvd_cifar.distributed.fit import together

    rank, n = hvd.rank(), hvd.size()
    x, y = nets.data()
    sizes = [[4, 4, 2], [3, 1], [2]][:n]  # examples in the batches of each rank
    parts = [slice(3 * rank, 3 * rank + size) for size in sizes[rank]]
    batches = [(x[k][part], y[k][part]) for k, part in enumerate(parts)]
    model = nets.net()
    optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), op="sum")
    steps = 0
    for (inputs, targets), weight in together(batches):
        with tf.GradientTape() as tape:
            count = all_reduce_in_graph(tf.constant(weight * len(inputs)))
            loss = weight * tf.reduce_sum((model(inputs) - targets) ** 2) / count
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        steps += 1
    alone, plain = nets.net(), keras.optimizers.SGD(0.1)
    for k in range(3):
        rows = [3 * r + i for r, of_rank in enumerate(sizes) for i in range(of_rank[k] if k < len(of_rank) else 0)]
        inputs, targets = x[k][rows], y[k][rows]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((alone(inputs) - targets) ** 2)
        plain.apply(tape.gradient(loss, alone.trainable_variables), alone.trainable_variables)
    return [steps, nets.flat(model), nets.flat(alone)]


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_with_other_numbers_of_batches_count_every_example_once(n: int, jobs: Jobs) -> None:
    for steps, weights, alone in jobs(n)["together"]:
        assert steps == 3 and np.allclose(weights, alone, rtol=0, atol=1e-5)
