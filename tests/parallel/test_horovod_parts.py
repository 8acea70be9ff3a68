"""The parts of Horovod's Keras interface under Keras 3: layers, states, callbacks, local layers, errors."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests import horovod_nets as nets
from tests.ranks import Jobs, error_of, run_all


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    of_two = {"batch norm": _batch_norm, "state": _state, "local": _local, "loaded": _loaded, "join": _join}
    return cache(lambda n: run_all({"errors": _errors} if n == 1 else of_two, n))


def _batch_norm() -> list[list[float]]:
    hvd = nets.start()
    import keras

    layers = (hvd.SyncBatchNormalization(), keras.layers.BatchNormalization())
    optimizers = (hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.optimizers.SGD(0.1))
    shards = (slice(hvd.rank(), None, hvd.size()), slice(None))
    return [nets.train(nets.net(layer=la), o, s) for la, o, s in zip(layers, optimizers, shards, strict=True)]


def test_batch_norm_has_the_statistics_of_all_ranks(jobs: Jobs) -> None:
    for weights, alone in jobs(2)["batch norm"]:
        assert np.allclose(weights, alone, rtol=0, atol=2e-5)


def _state() -> dict[str, Any]:
    """What `KerasState` and `TensorFlowState` hold after sync, restore and commit; what is broadcast of a model."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_keras
    import keras
    import tensorflow as tf

    rank = hvd.rank()
    net, optimizer = nets.net(seed=rank), keras.optimizers.Adam(0.05 + rank)
    if rank == 0:  # as where only one rank has loaded a checkpoint
        optimizer.build(net.trainable_variables)
    state = hvd_keras.elastic.KerasState(net, optimizer, epoch=10 + rank)
    state.sync()
    found: dict[str, Any] = {"synced": [nets.flat(net), state.epoch, float(optimizer.learning_rate.numpy())]}
    net.set_weights([w + 1 for w in net.get_weights()])
    state.epoch += 1
    state.restore()
    found["restored"] = [nets.flat(net), state.epoch, float(optimizer.learning_rate.numpy())]
    net.set_weights([w + 1 for w in net.get_weights()])
    state.commit()
    state.restore()
    found["committed"] = nets.flat(net)
    tf.keras.backend.set_value(optimizer.lr, 0.25)  # as Horovod's page of elastic programs does after a reset
    found["set"] = float(tf.keras.backend.get_value(optimizer.lr))
    variable = tf.Variable([float(rank)])
    hvd.elastic.TensorFlowState([variable]).sync()
    variable.assign([float(rank)])
    hvd.elastic.TensorFlowState([variable]).sync()
    found["variable"] = variable.numpy().tolist()
    drop = keras.Sequential([keras.Input((2,)), keras.layers.Dropout(0.5, seed=rank), keras.layers.Dense(1)])
    hvd.broadcast_variables(drop.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    found["dropout"] = drop.layers[0].seed_generator.state.numpy().tolist()
    found["weights"] = nets.flat(drop)
    found["gathered"] = hvd.allgather(drop.trainable_variables[1]).numpy().tolist()
    return found


def test_elastic_state_is_that_of_rank_0(jobs: Jobs) -> None:
    first, second = jobs(2)["state"]
    dropout = [rank.pop("dropout") for rank in (first, second)]
    assert dropout[0] != dropout[1]  # ranks do not drop the same units
    assert first == second and first["synced"] == first["restored"]
    assert first["synced"][1:] == [10, pytest.approx(0.05)]
    assert first["committed"] == pytest.approx(np.add(first["synced"][0], 1))
    assert first["set"] == 0.25 and first["variable"] == [0.0] and first["gathered"] == [0.0, 0.0]


def _local() -> dict[str, Any]:
    """The gradient of a layer of a rank's own, as a step of 1 applied it: by optimizer, by tape, and unscaled."""
    hvd = nets.start()
    import horovod.keras as hvd_keras
    import keras
    import tensorflow as tf

    found = {}
    value = float(hvd.rank() + 1)
    for way in ("tape", "unscaled", "loss scale", "optimizer"):
        net = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1)])
        net.set_weights([np.ones(w.shape) for w in net.get_weights()])
        optimizer: Any = keras.optimizers.SGD(1.0)
        if way == "loss scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        if way != "tape":
            options: dict[str, Any] = {"local_layers": net.layers[0], "scale_local_gradients": way != "unscaled"}
            optimizer = hvd_keras.PartialDistributedOptimizer(optimizer, **options)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(net(tf.fill((1, 1), value)))
        if way == "tape":
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=net.layers[:1])
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(gradients, net.trainable_variables, strict=True))
        found[way] = (1 - np.array(nets.flat(net)[:2])).tolist()  # the third is the bias, 1 on every rank
    # Gradients that `compute_gradients` has summed are not summed again.
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum)
    reduced = optimizer.compute_gradients(lambda: tf.reduce_sum(net(tf.fill((1, 1), value))), net.trainable_variables)
    before = nets.flat(net)
    optimizer.apply_gradients(reduced)
    found["reduced before"] = before[2] - nets.flat(net)[2]
    return found


def test_local_layers_keep_their_gradients(jobs: Jobs) -> None:
    for rank, found in enumerate(jobs(2)["local"]):
        for way in ("optimizer", "loss scale", "tape"):
            assert found[way] == pytest.approx([(rank + 1) / 2, 1.5]), way
        assert found["unscaled"] == pytest.approx([rank + 1, 1.5])
        assert found["reduced before"] == pytest.approx(2.0)


def _loaded() -> list[list[float]]:
    """Weights and velocities of a model that rank 0 has loaded, or each has made; by the ranks' models or by `fit`."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_keras
    import keras

    x, y = nets.data()
    found = []
    for loads, has_input in ((True, True), (True, False), (False, False)):
        keras.utils.set_random_seed(hvd.rank())
        inputs = [keras.Input(x[0].shape[1:])] if has_input or (loads and hvd.rank() == 0) else []
        net = keras.Sequential([*inputs, keras.layers.Dense(4), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        if loads and hvd.rank() == 0:
            net.compile(optimizer, loss="mse")
            net.fit(x[0], y[0], verbose=0)
            with tempfile.TemporaryDirectory() as folder:
                net.save(f"{folder}/net.keras")
                net = hvd_keras.load_model(f"{folder}/net.keras")
        else:
            net.compile(hvd_keras.DistributedOptimizer(optimizer), loss="mse")
        net.fit(x[hvd.rank()], y[0], callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)
        found.append([*nets.flat(net), *np.concatenate([np.ravel(v) for v in net.optimizer.variables]).tolist()])
    return found


def test_a_model_that_one_rank_has_loaded_or_fit_builds_is_broadcast(jobs: Jobs) -> None:
    first, second = jobs(2)["loaded"]
    assert first == second


def _join() -> str:
    hvd = nets.start()
    import keras

    nets.train(nets.net(sparse=True), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), sparse=True)
    return error_of(hvd.join)


def test_join_after_sparse_gradients_is_an_error_and_no_hang(jobs: Jobs) -> None:
    for told in jobs(2)["join"]:
        assert "hvd.join() after allgather" in told and "sparse_as_dense=True" in told


def _errors() -> list[str]:
    """What an optimizer says that would not average; and whether `from_config` makes one that does."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_keras
    import keras

    adam, wrap = keras.optimizers.Adam, hvd_keras.DistributedOptimizer
    wrapped = wrap(adam())
    attempts: tuple[Callable[[], Any], ...] = (
        lambda: wrap(wrapped),
        lambda: wrap(adam(), op=hvd.Adasum),
        lambda: wrap(adam(), op=hvd.Sum, gradient_predivide_factor=2.0),
        lambda: wrap(adam(), backward_passes_per_step=0),
        lambda: wrapped.compute_gradients(1.0, []),
    )
    return [*map(error_of, attempts), str(hasattr(type(wrapped).from_config(wrapped.get_config()), "on_all_ranks"))]


def test_what_would_not_average_is_an_error(jobs: Jobs) -> None:
    (said,) = jobs(1)["errors"]
    keys = ["already distributed", "only supports Average", "hvd.Average", "at least 1", "give the tape", "True"]
    for text, key in zip(said, keys, strict=True):
        assert key in text
