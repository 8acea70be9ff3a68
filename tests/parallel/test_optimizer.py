"""`DistributedOptimizer` against the average computed by hand, on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks

LAUNCHES = [(2, "mpirun"), (3, "mpirun"), (2, "gloo")]


def _start() -> Any:
    from hvd_cifar.runtime.world import start

    return start()


def _updates_by_hand() -> dict[str, list[float]]:
    """One update from zero with the gradients rank + 1 and 10 * (rank + 1), in every way that they get there."""
    world = _start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    ended = {}
    for way in ("apply", "apply_gradients", "tf.function", "LossScaleOptimizer", "sum"):
        variables = [keras.Variable(np.zeros(1, "float32")), keras.Variable(np.zeros(1, "float32"))]
        gradients = [tf.constant([world.rank + 1.0]), tf.constant([10.0 * (world.rank + 1.0)])]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum" if way == "sum" else "average")
        optimizer.build(variables)
        if way == "apply_gradients":
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        elif way == "tf.function":
            tf.function(optimizer.apply)(gradients, [v.value for v in variables])
        elif way == "LossScaleOptimizer":
            outer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
            outer.apply([g * 8.0 for g in gradients], variables)
        else:
            optimizer.apply(gradients, variables)
        ended[way] = [float(v.numpy()[0]) for v in variables]
    return ended


@pytest.mark.parametrize(("n", "launcher"), LAUNCHES)
def test_gradients_are_averaged(n: int, launcher: str) -> None:
    total = sum(range(1, n + 1))
    for ended in run_ranks(_updates_by_hand, n, launcher=launcher):
        assert ended.pop("sum") == [-total, -10 * total]
        for way, values in ended.items():
            assert values == [-total / n, -10 * total / n], way


def _several_things() -> dict[str, Any]:
    """All that one start of two ranks can show: most of a test's time is the start."""
    world = _start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    rank = world.rank
    seen: dict[str, Any] = {}

    def variable(value: Any, dtype: str = "float32") -> keras.Variable:
        return keras.Variable(np.asarray(value, dtype="float32"), dtype=dtype)

    # fp16 on the wire: 1/3 is not representable, and comes back rounded to half precision.
    v = variable([0.0])
    DistributedOptimizer(keras.optimizers.SGD(1.0), compression="fp16").apply([tf.constant([1 / 3])], [v])
    seen["fp16"] = float(v.numpy()[0])

    # bfloat16 variables, which Horovod cannot send.
    v = variable([0.0], "bfloat16")
    DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant([rank + 1.0], tf.bfloat16)], [v])
    seen["bfloat16"] = float(v.numpy().astype("float32")[0])

    # Sparse and dense gradients together, dense first; row 1 comes from both ranks.
    dense, table = variable([0.0]), variable(np.zeros((4, 2)))
    rows = tf.IndexedSlices(tf.ones([2, 2]) * (rank + 1.0), tf.constant([rank, rank + 1]), tf.constant([4, 2]))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.constant([rank + 1.0]), rows], [dense, table])
    seen["dense beside sparse"] = float(dense.numpy()[0])
    seen["sparse"] = table.numpy()[:, 0].tolist()
    table.assign(np.zeros((4, 2)))
    DistributedOptimizer(keras.optimizers.SGD(1.0), sparse_as_dense=True).apply([rows], [table])
    seen["sparse as dense"] = table.numpy()[:, 0].tolist()

    # A gradient that no rank has.
    v, w = variable([0.0]), variable([5.0])
    DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([tf.constant([rank + 1.0]), None], [v, w])
    seen["beside None"] = [float(v.numpy()[0]), float(w.numpy()[0])]

    # Two passes to an update; `iterations` counts updates.
    for average in (False, True):
        v = variable([0.0])
        optimizer = DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        optimizer.build([v])
        step = tf.function(optimizer.apply)
        path = []
        for k in range(5):
            step([tf.constant([(rank + 1.0) * (k + 1)])])
            path.append(float(v.numpy()[0]))
        seen[f"passes averaged={average}"] = path
        seen["updates"] = int(optimizer.iterations.numpy())

    # Clipping by the global norm comes after averaging.
    v = variable([0.0, 0.0])
    gradient = tf.constant([6.0, 0.0]) if rank == 0 else tf.constant([0.0, 8.0])
    DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0)).apply([gradient], [v])
    seen["clipped"] = v.numpy().tolist()
    return seen


def test_two_ranks_in_all_variants() -> None:
    first, second = run_ranks(_several_things, 2)
    assert first == second
    assert first["fp16"] == -float(np.float16(1 / 3))
    assert first["bfloat16"] == -1.5
    assert first["dense beside sparse"] == -1.5
    assert first["sparse"] == first["sparse as dense"] == [-0.5, -1.5, -1.0, 0.0]
    assert first["beside None"] == [-1.5, 5.0]
    assert first["passes averaged=False"] == [0.0, -4.5, -4.5, -15.0, -15.0]
    assert first["passes averaged=True"] == [0.0, -2.25, -2.25, -7.5, -7.5]
    assert first["updates"] == 2
    assert first["clipped"] == pytest.approx([-0.6, -0.8])


def _sums_beside_gradients() -> dict[str, Any]:
    """`apply_and_sum` in a graph, in all ways: what variable and values become, and what is sent before what."""
    world = _start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed.optimizer import DistributedOptimizer

    rank = world.rank
    ways: dict[str, dict[str, Any]] = {
        "sum": {"op": "sum"},
        "average": {"op": "average"},
        "fp16": {"op": "sum", "compression": "fp16"},
        "fixed order": {"op": "sum", "fixed_order": True},
        "passes": {"op": "sum", "backward_passes_per_step": 2},
        "loss scale": {"op": "sum"},
    }
    seen: dict[str, Any] = {}
    for way, options in ways.items():
        variable = keras.Variable(np.zeros(1, "float32"))
        optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        if way == "loss scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        optimizer.build([variable])

        step = tf.function(_apply_with(optimizer, variable), autograph=False)
        graph = step.get_concrete_function(tf.TensorSpec([1], tf.float32)).graph
        sums = step(tf.constant([rank + 1.0]))
        sent = [op for op in graph.get_operations() if op.type.startswith("Horovod")]
        seen[way] = {
            "variable": float(variable.numpy()[0]),
            "sums": [s.numpy().tolist() for s in sums],
            "sent": [len(op.inputs) for op in sent],
            "early": [op.name for op in sent if "gradient" not in _before(op)],
        }
    return seen


def _apply_with(optimizer: Any, variable: Any) -> Callable[[Any], list[Any]]:
    import tensorflow as tf

    from hvd_cifar.distributed.optimizer import apply_and_sum

    def step(value: Any) -> list[Any]:
        gradient = tf.square(value, name="gradient")
        return apply_and_sum(optimizer, [gradient], [variable], [value / 3.0, tf.stack([value[0], -value[0]])])

    return step


def _before(op: Any) -> set[str]:
    """Names of the operations that come before one, by data or by control."""
    found: set[str] = set()
    waiting = [op]
    while waiting:
        for other in [*(tensor.op for tensor in waiting[-1].inputs), *waiting.pop().control_inputs]:
            if other.name not in found:
                found.add(other.name)
                waiting.append(other)
    return found


def test_what_is_summed_beside_gradients_travels_in_their_message_where_it_can() -> None:
    """The loss of each step: in a message of its own it costs each step a meeting of the ranks' threads."""
    first, second = run_ranks(_sums_beside_gradients, 2)
    assert first == second
    for way, seen in first.items():
        moved = {"average": -2.5, "passes": 0.0}.get(way, -5.0)
        assert seen["variable"] == moved, way
        thirds, pair = seen["sums"]
        assert thirds == [float(np.float32(1 / 3) + np.float32(2 / 3))], way  # to the bit: no half precision
        assert pair == [3.0, -3.0], way
        assert seen["early"] == [], way  # of a gradient: the ranks' threads would meet while backward computes
    assert first["sum"]["sent"] == [3]
    assert first["fixed order"]["sent"] == [1]  # all in one tensor
    assert all(len(seen["sent"]) > 1 for way, seen in first.items() if way not in ("sum", "fixed order"))


def _update_in_process_set() -> float:
    world = _start()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer, collectives

    pair = hvd.add_process_set([1, 2])
    v = keras.Variable(np.zeros(1, "float32"))
    DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair).apply([tf.constant([world.rank + 1.0])], [v])
    collectives.all_reduce_sums([0.0])  # rank 0 has nothing to wait for, and its end would end the others
    return float(v.numpy()[0])


def test_process_set_averages_among_its_members_only() -> None:
    ended = run_ranks(_update_in_process_set, 3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert ended == [-1.0, -2.5, -2.5]


def _fit(mixed: bool, poisoned: bool) -> dict[str, Any]:
    """`model.fit` on each rank's own data; returns the weights, and what one process would get on all the data."""
    world = _start()
    import keras

    from hvd_cifar.distributed import DistributedOptimizer, broadcast_variables

    if mixed:
        keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(world.rank)  # ranks begin differently, and must not stay so

    def model(optimizer: Any) -> keras.Model:
        layers = [keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, dtype="float32")]
        net = keras.Sequential(layers)
        net.compile(optimizer, loss="mse", jit_compile=False)
        return net

    draw = np.random.default_rng(5)
    x = draw.normal(size=(8 * world.size, 3)).astype("float32")
    y = draw.normal(size=(8 * world.size, 1)).astype("float32")
    net = model(DistributedOptimizer(keras.optimizers.Adam(0.05)))
    broadcast_variables(net)
    start = [w.tolist() for w in net.get_weights()]
    if poisoned and world.rank == world.size - 1:
        x_mine = np.where(np.arange(len(x))[:, None] == world.rank, np.inf, x)  # one bad example in the first batch
    else:
        x_mine = x
    # Batches of 4 a rank: step k of the job is x[4 * size * k : 4 * size * (k + 1)].
    mine = np.arange(8 * world.size).reshape(2, -1)[:, world.rank :: world.size].ravel()
    net.fit(x_mine[mine], y[mine], batch_size=4, epochs=3, shuffle=False, verbose=0)

    whole = model(keras.optimizers.Adam(0.05))
    whole.set_weights([np.asarray(w) for w in start])
    whole.fit(x, y, batch_size=4 * world.size, epochs=3, shuffle=False, verbose=0)
    outer = net.optimizer
    return {
        "optimizer": type(outer).__name__,
        "start": np.concatenate([np.ravel(w) for w in start]).tolist(),
        "weights": np.concatenate([w.ravel() for w in net.get_weights()]).tolist(),
        "alone": np.concatenate([w.ravel() for w in whole.get_weights()]).tolist(),
        "updates": int(outer.iterations.numpy()),
        "scale": float(outer.dynamic_scale.numpy()) if mixed else 1.0,
    }


@pytest.mark.parametrize(("n", "launcher"), LAUNCHES)
def test_fit_equals_one_process_on_all_the_data(n: int, launcher: str) -> None:
    ranks = run_ranks(_fit, n, False, False, launcher=launcher)
    for rank in ranks:
        assert rank["start"] == ranks[0]["start"]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["updates"] == 6
        assert rank["weights"] != rank["start"]
        # float32, six Adam steps: sums in another order.
        assert np.allclose(rank["weights"], rank["alone"], rtol=1e-4, atol=1e-5)


def test_ranks_skip_a_step_together_when_one_overflows() -> None:
    """Under mixed_float16 Keras puts its LossScaleOptimizer outside by itself; one rank's gradients are not finite."""
    ranks = run_ranks(_fit, 2, True, True)
    assert [rank["optimizer"] for rank in ranks] == ["LossScaleOptimizer"] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert np.isfinite(ranks[0]["weights"]).all() and ranks[0]["weights"] != ranks[0]["start"]
    assert ranks[0]["scale"] == ranks[1]["scale"] == 2.0**15 / 2**3  # halved in each of the three epochs
    assert ranks[0]["updates"] == ranks[1]["updates"] == 3


def _captured_gradient() -> list[float]:
    """An update in a graph with a gradient from outside it, on ranks that have made different numbers of tensors."""
    world = _start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    made = [tf.constant(float(i)) for i in range(3 * world.rank)]
    variable = keras.Variable(np.zeros(1, "float32"))
    optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([variable])
    gradient = tf.constant([world.rank + 1.0]) + float(len(made))
    tf.function(lambda: optimizer.apply([gradient], [variable]))()
    return [float(variable.numpy()[0])]


def test_ranks_that_made_other_tensors_before_do_not_wait_for_each_other() -> None:
    """Horovod names an operation after its input, and TensorFlow a captured tensor after a count of all tensors."""
    assert run_ranks(_captured_gradient, 2, timeout=60) == [[-3.0], [-3.0]]  # the average of 1 and 2 + 3
