"""Horovod's own names under Keras 3, as a Horovod program uses them: ranks end with one process's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import horovod_nets as nets
from tests.horovod_nets import BATCH, STEPS
from tests.ranks import run_ranks

OTHER_WAYS = [(1, "mpirun"), (3, "mpirun"), (1, "gloo"), (2, "gloo"), (3, "gloo")]  # ranks and launchers
WAYS = [(2, "mpirun"), *(pytest.param(*way, marks=pytest.mark.slow) for way in OTHER_WAYS)]


def _cases(hvd: Any) -> dict[str, tuple[Callable[[Any], Any], dict[str, Any]]]:
    """By case: from a net to the optimizer that trains it, and how `nets.train` does."""
    import horovod.keras as hvd_keras
    import horovod.tensorflow.keras as hvd_tf_keras
    import keras

    def adam() -> Any:
        return keras.optimizers.Adam(0.05)

    def pairs(net: Any) -> Any:
        kernel, bias, other, last = net.trainable_variables
        return [[kernel, other], [bias]]  # `last` in no group

    wrap = hvd_tf_keras.DistributedOptimizer
    return {
        "eager": (lambda net: wrap(adam()), {"graph": False}),
        "graph": (lambda net: wrap(adam()), {}),
        "horovod.keras": (lambda net: hvd_keras.DistributedOptimizer(adam()), {}),
        "horovod.tensorflow": (lambda net: hvd.DistributedOptimizer(adam()), {}),
        "sum": (lambda net: hvd.DistributedOptimizer(adam(), op=hvd.Sum), {"scale": 1 / hvd.size()}),
        "fp16": (lambda net: wrap(adam(), compression=hvd.Compression.fp16), {}),
        "predivided": (lambda net: wrap(adam(), gradient_predivide_factor=2.0), {}),
        "two groups": (lambda net: wrap(adam(), num_groups=2), {}),
        "listed groups": (lambda net: wrap(adam(), groups=pairs(net)), {}),
        "loss scale": (lambda net: wrap(keras.optimizers.LossScaleOptimizer(adam())), {}),
        "loss scale outside": (lambda net: keras.optimizers.LossScaleOptimizer(wrap(adam())), {}),
        "clipped": (lambda net: wrap(keras.optimizers.Adam(0.05, global_clipnorm=0.1)), {}),
        "sparse": (lambda net: wrap(adam()), {"sparse": True}),
        "sparse in groups": (lambda net: wrap(adam(), groups=2), {"sparse": True}),
        "tape": (lambda net: adam(), {"tape": hvd.DistributedGradientTape}),
        "tape, sparse": (lambda net: adam(), {"tape": hvd.DistributedGradientTape, "sparse": True}),
    }


def _loops() -> dict[str, Any]:
    """Weights after a loop of one's own, beside those of one process on the whole batches, by case."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_tf_keras
    import keras

    shard, wrap, cases = slice(hvd.rank(), None, hvd.size()), hvd_tf_keras.DistributedOptimizer, _cases(hvd)
    found = {}
    plain: dict[Any, Any] = {}  # what one process gets
    for case, (make, how) in cases.items():
        sparse, clipped = how.get("sparse", False), case == "clipped"
        # Keras 3's Adam takes rows of one index one by one: the optimizer's equal are whole tables.
        tape = nets.Dense if sparse and "tape" not in how else nets.as_it_is
        if (key := (sparse, clipped, tape)) not in plain:
            alone = keras.optimizers.Adam(0.05, global_clipnorm=0.1 if clipped else None)
            plain[key] = nets.train(nets.net(sparse), alone, sparse=sparse, tape=tape)
        net = nets.net(sparse)
        found[case] = [nets.train(net, make(net), shard, **how), plain[key]]
    net = nets.net()
    listed = partial(hvd.DistributedGradientTape, groups=[net.trainable_variables[::2]])
    trained = nets.train(net, keras.optimizers.Adam(0.05), shard, tape=listed)
    found["tape, listed groups"] = [trained, found["graph"][1]]
    optimizer = wrap(keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True)
    passes = nets.train(nets.net(), optimizer, shard, passes=2)
    found["passes"] = [passes, nets.train(nets.net(), keras.optimizers.SGD(0.1))]
    found["counted passes"] = [[float(optimizer.iterations.numpy())], [2.0 * STEPS]]
    optimizer = wrap(keras.optimizers.SGD(0.1, momentum=0.9))
    net = nets.net()
    for x, y in zip(*nets.data(), strict=True):
        optimizer.minimize(_loss(net, x[shard], y[shard]), net.trainable_variables)
    found["minimize"] = [nets.flat(net), nets.train(nets.net(), keras.optimizers.SGD(0.1, momentum=0.9))]
    return found


def _loss(net: Any, x: Any, y: Any) -> Callable[[], Any]:
    import tensorflow as tf

    return lambda: tf.reduce_mean((net(x) - y) ** 2)


@pytest.mark.parametrize(("n", "launcher"), WAYS)
def test_a_loop_of_ones_own_equals_one_process(n: int, launcher: str) -> None:
    for rank in run_ranks(_loops, n, launcher=launcher, timeout=300):
        for case, (weights, alone) in rank.items():
            tolerance = 5e-3 if case == "fp16" else 2e-5
            assert np.allclose(weights, alone, rtol=0, atol=tolerance), case


def _fit(folder: str) -> dict[str, Any]:
    """Weights, logs and learning rates of `fit` with all callbacks, of a loaded model, and of one process."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_keras
    import keras

    n, rank = hvd.size(), hvd.rank()
    x, y = nets.data()
    x_own, y_own = (v[:, rank::n].reshape(-1, v.shape[-1]) for v in (x, y))
    fit = {"epochs": 2, "shuffle": False, "verbose": 0}
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(n - 1),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1, verbose=0),
        hvd_keras.callbacks.LearningRateScheduleCallback(0.05, multiplier=0.1, start_epoch=1),
        best := hvd_keras.callbacks.BestModelCheckpoint(monitor="mae"),
    ]
    best.filepath = f"{folder}/best-{rank}.keras"
    net = nets.net(seed=rank)
    optimizer = hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
    # Keras 3 cannot load them by their names, "mse" and "mae", from a file of its older format.
    loss, mae = keras.losses.MeanSquaredError(), keras.metrics.MeanAbsoluteError(name="mae")
    net.compile(loss=loss, optimizer=optimizer, metrics=[mae], experimental_run_tf_function=False)
    history = net.fit(x_own, y_own, batch_size=BATCH // n, callbacks=callbacks, **fit).history
    found: dict[str, Any] = {"weights": nets.flat(net), "logs": {k: np.ravel(v).tolist() for k, v in history.items()}}
    found["best"] = [min(history["mae"]), best.best, nets.flat(hvd_keras.load_model(best.filepath))]

    # The same by one process: the rates and the corrections of the momentum by hand.
    alone = nets.net(seed=n - 1)
    plain = keras.optimizers.SGD(0.05, momentum=0.9)
    alone.compile(plain, loss="mse", metrics=["mae"])
    rates = [0.05 / n * ((k + 1) / STEPS * (n - 1) + 1) for k in range(STEPS)] + [0.05] * STEPS
    alone_logs: dict[str, list[float]] = {"loss": [], "mae": []}
    plain.build(alone.trainable_variables)
    old = 0.05
    for epoch in range(2):
        logs = []
        for k in range(STEPS):
            rate = rates[epoch * STEPS + k]
            for velocity in plain.momentums:
                velocity.assign(velocity * rate / old)
            plain.learning_rate = old = rate
            logs.append(alone.train_on_batch(x[k], y[k], return_dict=True))
            alone.reset_metrics()
        for name, values in alone_logs.items():
            values.append(float(np.mean([log[name] for log in logs])))
    found |= {"alone": nets.flat(alone), "alone logs": alone_logs, "last rate": float(optimizer.lr.numpy())}

    # What rank 0 saved goes on, with its velocities, in a model that every rank loads.
    paths = [f"{folder}/{n}.keras", f"{folder}/{n}.h5"]
    for path in paths if rank == 0 else ():
        net.save(path)
    hvd.broadcast_object(0)
    models = [*(hvd_keras.load_model(path, compression=hvd.Compression.none) for path in paths), net]
    for model in models:
        model.fit(x_own, y_own, batch_size=BATCH // n, **fit)
    *found["loaded"], found["went on"] = map(nets.flat, models)
    return found


@pytest.mark.parametrize(("n", "launcher"), WAYS)
def test_fit_with_all_callbacks_equals_one_process(n: int, launcher: str, tmp_path: Path) -> None:
    ranks = run_ranks(_fit, n, str(tmp_path), launcher=launcher, timeout=300)
    for rank in ranks:
        assert rank["weights"] == ranks[0]["weights"] and rank["logs"] == ranks[0]["logs"]
        assert np.allclose(rank["weights"], rank["alone"], rtol=0, atol=2e-5)
        assert np.allclose(rank["loaded"], rank["went on"], rtol=0, atol=2e-6)
        least, best, saved = rank["best"]
        assert least == best and saved == ranks[0]["best"][2]
        for name, values in rank["alone logs"].items():
            assert np.allclose(rank["logs"][name], values, rtol=1e-4), name
        assert rank["last rate"] == pytest.approx(0.05)


def _wrapped_late() -> list[list[float]]:
    """Weights of a model that has trained alone and then reduces, whose step is traced again, and of one process."""
    hvd = nets.start()
    import horovod.tensorflow.keras as hvd_keras
    import keras

    n, rank = hvd.size(), hvd.rank()
    x, y = (v.reshape(-1, v.shape[-1]) for v in nets.data())
    net, alone, sgd = nets.net(), nets.net(), keras.optimizers.SGD(0.05)
    net.compile(sgd, loss="mse")
    alone.compile(keras.optimizers.SGD(0.05), loss="mse")
    for part in (slice(4), slice(rank, BATCH, n)):
        net.fit(x[part], y[part], batch_size=BATCH, shuffle=False, verbose=0)
        if not hasattr(sgd, "on_all_ranks"):
            hvd_keras.DistributedOptimizer(sgd)
    for count in (4, BATCH):
        alone.fit(x[:count], y[:count], batch_size=BATCH, shuffle=False, verbose=0)
    return [nets.flat(net), nets.flat(alone)]


def test_a_step_that_was_traced_before_is_traced_again() -> None:
    for late, alone in run_ranks(_wrapped_late, 2):
        assert np.allclose(late, alone, rtol=0, atol=2e-6)
