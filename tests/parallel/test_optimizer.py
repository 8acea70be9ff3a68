"""`DistributedOptimizer` against the average computed by hand, on real ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from tests import horovod_nets as nets
from tests.ranks import Jobs, error_of, run_all, run_ranks


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    functions: dict[int, dict[str, Callable[..., Any]]] = {
        1: {
            "wrapped": _wrapped_against_plain,
            "saved": partial(_saved_and_loaded, str(tmp_path_factory.mktemp("saved"))),
            "rows and errors": _rows_and_errors,
        },
        2: {
            "kinds": _gradients_of_many_kinds,
            "sums beside": _sums_beside_gradients,
            "overflow": partial(_fit, True),
        },
        3: {"fit": _fit},
    }
    return cache(lambda n: run_all(functions[n], n, timeout=300))


def _optimizers() -> dict[str, Callable[[], Any]]:
    """Every optimizer that Keras ships, and Adam with options, by name."""
    import keras

    room = keras.optimizers
    made: dict[str, Callable[[], Any]] = {
        "moving averages": lambda: room.Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        "clipped": lambda: room.Adam(0.1, global_clipnorm=0.1),
        "gradient accumulation": lambda: room.Adam(0.1, gradient_accumulation_steps=2),
        "excluded": lambda: room.Adam(0.1, weight_decay=0.1),
        "schedule": lambda: room.Adam(room.schedules.ExponentialDecay(0.1, 1, 0.5)),
        "loss scale": lambda: room.LossScaleOptimizer(room.SGD(0.1), initial_scale=4.0, dynamic_growth_steps=2),
    }
    kinds = {k for k in vars(room).values() if isinstance(k, type) and issubclass(k, room.Optimizer)}
    for kind in kinds - {room.Optimizer, room.LossScaleOptimizer, getattr(room, "MultiOptimizer", None)}:
        made[kind.__name__] = partial(kind, 0.1)
    return made


def _graph(function: Callable[..., Any], *given: Any) -> Any:
    """A function's graph, with its first arguments as they are: `tf.function` turns those of a `partial` to tensors."""
    import tensorflow as tf

    return tf.function(lambda *others: function(*given, *others), autograph=False)


def _train_optimizer(optimizer: Any, wrapped_after: int | None, graph: bool) -> list[bytes]:
    """Bits of two weights and of the optimizer's variables after each of 4 steps; None: it is never wrapped."""
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    draw = np.random.default_rng(7)
    weights = [keras.Variable(draw.normal(size=shape).astype("float32")) for shape in ((3, 2), (2,))]
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_list=weights[:1])
    if wrapped_after == -1:  # before it is built
        DistributedOptimizer(optimizer)
    optimizer.build(weights)
    bits = []
    for step in range(4):
        if step == wrapped_after:
            DistributedOptimizer(optimizer)
        gradients = [tf.constant(draw.normal(size=v.shape), tf.float32) for v in weights]
        # A new function for each step: one that was traced with the plain optimizer would not reduce.
        (_graph(optimizer.apply, gradients, weights) if graph else partial(optimizer.apply, gradients, weights))()
        bits.append(b"".join(v.numpy().tobytes() for v in [*weights, *optimizer.variables]))
    return bits


def _wrapped_against_plain() -> dict[str, Any]:
    """Where a wrapped optimizer differs from the plain one, on one rank."""
    nets.start()
    made = _optimizers()
    wrong, unlike = [], set()
    for name, make in made.items():
        for graph in (False, True) if name in ("Adam", "loss scale") else (False,):
            plain = _train_optimizer(make(), None, graph)
            unlike.add(plain[-1])
            wrong += [f"{name}, {n}" for n in (-1, 2) if _train_optimizer(make(), n, graph) != plain]
    return {"names": sorted(made), "unlike": len(unlike), "wrong": wrong}


def test_a_wrapped_optimizer_keeps_the_whole_state_of_the_plain_one(jobs: Jobs) -> None:
    (found,) = jobs(1)["wrapped"]
    assert {"SGD", "Adam", "AdamW", "Muon", "Lion", "Ftrl", "Adafactor"} <= set(found["names"])
    assert found["unlike"] > len(found["names"]) / 2  # the options do something
    assert found["wrong"] == []


def _saved_and_loaded(folder: str) -> dict[str, Any]:
    """A model and a checkpoint of a distributed optimizer, beside those of a plain one."""
    nets.start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    @keras.saving.register_keras_serializable("mine")
    class Own(keras.optimizers.SGD):
        pass

    def seen_of(name: str, optimizer: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")], name="net")
        net.compile(optimizer, loss="mse")
        net.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        net.save(f"{folder}/{name}.keras")
        path = tf.train.Checkpoint(optimizer=optimizer).save(f"{folder}/{name}")
        loaded = keras.models.load_model(f"{folder}/{name}.keras").optimizer
        return {
            "config": optimizer.get_config(),
            "variables": [v.path for v in optimizer.variables],
            "checkpoint": sorted(name for name, _ in tf.train.list_variables(path)),
            "loaded": [v.numpy().tolist() for v in loaded.variables],
            "saved": [v.numpy().tolist() for v in optimizer.variables],
            "wraps again": DistributedOptimizer(loaded) is loaded and hasattr(loaded, "on_all_ranks"),
            "name": type(optimizer).__name__,
        }

    found: dict[str, Any] = {}
    for kind in (keras.optimizers.AdamW, Own):
        found[f"plain {kind.__name__}"] = seen_of("plain", kind(0.1, name="the_optimizer"))
        wrapped = DistributedOptimizer(kind(0.1, name="the_optimizer"))
        found[f"wrapped {kind.__name__}"] = seen_of("wrapped", wrapped)
    return found


def test_a_distributed_optimizer_saves_as_the_plain_one(jobs: Jobs) -> None:
    (found,) = jobs(1)["saved"]
    for kind in ("AdamW", "Own"):
        plain, wrapped = found[f"plain {kind}"], found[f"wrapped {kind}"]
        assert wrapped["loaded"] == wrapped["saved"] and len(wrapped["loaded"]) > 1
        for what in ("config", "variables", "checkpoint", "loaded"):
            assert wrapped[what] == plain[what], what
        assert wrapped["wraps again"] and wrapped["name"] == kind


def _rows_and_errors() -> dict[str, Any]:
    """Sparse gradients and passes on one rank; and what an optimizer says that cannot be used so."""
    nets.start()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    found: dict[str, Any] = {}
    sgd = keras.optimizers.SGD
    summing = DistributedOptimizer(sgd(0.1), backward_passes_per_step=2)
    summing.build([keras.Variable([1.0])])
    found["of passes"] = [v.path.split("/")[-1] for v in summing.variables]
    many = tf.IndexedSlices(tf.fill((2000, 1), tf.constant(0.01, tf.bfloat16)), tf.zeros(2000, tf.int32), (1, 1))
    table = keras.Variable(np.zeros((1, 1)), dtype="bfloat16")
    DistributedOptimizer(sgd(1.0)).apply([many], [table])
    found["many rows"] = float(table.numpy()[0, 0])
    outer = keras.optimizers.LossScaleOptimizer(sgd(0.1))
    found["loss scale stays outside"] = DistributedOptimizer(outer) is outer
    pair, gradient = [keras.Variable([1.0]), keras.Variable([1.0])], tf.constant([1.0])
    by_turns = DistributedOptimizer(sgd(0.05), backward_passes_per_step=2)
    for _ in range(2):  # an update of one of them, whole
        by_turns.apply([gradient, None], pair)
    found["next passes"] = [float(v.numpy()[0]) for v in pair]
    by_turns.apply([gradient, gradient], pair)
    half, many = keras.Variable([0.0], dtype="bfloat16"), DistributedOptimizer(sgd(1.0), backward_passes_per_step=300)
    for _ in range(300):  # from the 128th on each is less than a bit of their sum
        many.apply([tf.constant([2.0**-9], tf.bfloat16)], [half])
    found["many passes"] = float(half.numpy()[0])
    net = nets.net()
    net.compile(outer, loss="mse")
    errors = {
        "another pass": lambda: by_turns.apply([None, gradient], pair),
        "twice": lambda: DistributedOptimizer(summing),
        "twice inside": lambda: DistributedOptimizer(outer),
        "no optimizer": lambda: DistributedOptimizer("adam"),
        "op": lambda: DistributedOptimizer(sgd(), op="mean"),
        "compression": lambda: DistributedOptimizer(sgd(), compression="bf16"),
        "process set": lambda: DistributedOptimizer(sgd(), process_set=hvd.ProcessSet([0])),
        "copy": lambda: copy.deepcopy(summing),
        "copy of a loss scale": lambda: copy.copy(outer),
        "copy of a model": lambda: pickle.dumps(net),
    }
    return found | {name: error_of(call) for name, call in errors.items()}


COPIES = ("copy", "copy of a loss scale", "copy of a model")
ERRORS = {
    "another pass": "only some have one of variable",
    "twice": "already distributed",
    "twice inside": "already distributed",
    "no optimizer": "Keras 3 optimizer, not str",
    "op": "'mean'",
    "compression": "compression is 'bf16': it must be one of none, fp16",
    "process set": "is not registered",
    **dict.fromkeys(COPIES, "cannot be copied or pickled"),
}


def test_rows_of_one_index_and_passes_add_up_and_misuse_is_an_error(jobs: Jobs) -> None:
    (found,) = jobs(1)["rows and errors"]
    assert found["of passes"] == ["iteration", "learning_rate"]
    assert found["many rows"] == pytest.approx(-20, rel=0.01)
    assert found["many passes"] == pytest.approx(-300 / 512, rel=0.01)
    assert found["loss scale stays outside"] and found["next passes"] == pytest.approx([0.9, 1.0])
    for name, told in ERRORS.items():
        assert told in found[name], name


def _gradients_of_many_kinds() -> dict[str, list[Any]]:
    """Variables, first zero, after SGD with a rate of 1 on two ranks, and what they must be, by case."""
    rank = nets.start().rank()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    one, least = tf.constant([rank + 1.0]), tf.constant([2.0**-24 / 2])  # of a share too small for fp16
    rows = tf.IndexedSlices(tf.ones([2, 2]) * (rank + 1.0), tf.constant([rank, rank + 1]), tf.constant([4, 2]))
    row = tf.IndexedSlices(least[:, None], tf.constant([0]), tf.constant([1, 1]))
    crossed, shares = tf.constant([[6.0, 0.0], [0.0, 8.0]][rank]), {"op": "sum", "compression": "fp16"}
    cases: dict[str, tuple[list[Any], dict[str, Any], list[float]]] = {
        "fp16": ([tf.constant([1 / 3])], {"compression": "fp16"}, [-float(np.float16(1 / 3))]),
        "least share": ([least], shares, [-(2.0**-24)]),
        "least share, sparse": ([row], shares, [-(2.0**-24)]),
        "least share, fixed order": ([least], {**shares, "fixed_order": True}, [-(2.0**-24)]),
        "dense before sparse": ([one, rows], {}, [-1.5, -0.5, -1.5, -1.0, 0.0]),  # row 1 comes from both ranks
        "sparse as dense": ([rows], {"sparse_as_dense": True}, [-0.5, -1.5, -1.0, 0.0]),
        "a gradient that no rank has": ([one, None], {}, [-1.5, 0.0]),
        "clipped": ([crossed], {}, [-0.6, -0.8]),  # the average
    }
    found: dict[str, list[Any]] = {}
    for case, (gradients, options, expected) in cases.items():
        variables = [keras.Variable(np.zeros((1,) if g is None else g.shape), dtype="float32") for g in gradients]
        plain = keras.optimizers.SGD(1.0, global_clipnorm=1.0 if case == "clipped" else None)
        DistributedOptimizer(plain, **options).apply(gradients, variables)
        found[case] = [[float(value) for v in variables for value in np.atleast_2d(v.numpy().T)[0]], expected]

    # Gradients of several types, by every way to reduce them.
    types = ("float32", "float64", "bfloat16", "float16", "float32")
    for way, options in WAYS_OF_TYPES.items():
        several = [keras.Variable(np.zeros(i + 1), dtype=dtype) for i, dtype in enumerate(types)]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.build(several)
        gradients = [tf.fill(v.shape, tf.constant((rank + 1.0) * (i + 1), v.dtype)) for i, v in enumerate(several)]
        update = _graph(optimizer.apply, gradients, several)
        for _ in range(options.get("backward_passes_per_step", 1)):
            update()
        factor = {"average": 1.5, "fp16": 1.5, "passes": 6.0}.get(way, 3.0)
        values = [v.numpy().astype("float64").tolist() for v in several]
        found[f"types, {way}"] = [values, [[-factor * (i + 1)] * (i + 1) for i in range(5)]]
        found[f"updates, {way}"] = [int(optimizer.iterations.numpy()), 1]
    return found


WAYS_OF_TYPES: dict[str, dict[str, Any]] = {
    "plain": {"op": "sum"},
    "average": {},
    "fp16": {"compression": "fp16"},
    "fixed order": {"op": "sum", "fixed_order": True},
    "passes": {"op": "sum", "backward_passes_per_step": 2},
}


def test_gradients_of_many_kinds(jobs: Jobs) -> None:
    for rank in jobs(2)["kinds"]:
        for case, (found, expected) in rank.items():
            assert found == pytest.approx(expected, rel=1e-6) if case == "clipped" else found == expected, case


def _sums_beside_gradients() -> dict[str, Any]:
    """`apply_and_sum` in a graph, by all ways: variable, sums, and the order of the messages."""
    hvd = nets.start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import buckets
    from hvd_cifar.distributed.optimizer import DistributedOptimizer, apply_and_sum

    seen: dict[str, Any] = {}
    for way, options in {**WAYS_OF_TYPES, "loss scale": {"op": "sum"}}.items():
        variable = keras.Variable(np.zeros(1, "float32"))
        optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        if way == "loss scale":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        optimizer.build([variable])

        def apply(optimizer: Any, variable: Any, value: Any) -> list[Any]:
            gradient = tf.square(value, name="gradient")
            return apply_and_sum(optimizer, [gradient], [variable], [value / 3.0, tf.stack([value[0], -value[0]])])

        step = _graph(apply, optimizer, variable)
        operations = step.get_concrete_function(tf.TensorSpec([1], tf.float32)).graph.get_operations()
        sums, before = step(tf.constant([hvd.rank() + 1.0])), buckets._ancestors(operations)
        sent = [op for op in operations if op.type.startswith("Horovod")]
        bit = 1 << [op.name for op in operations].index("gradient")
        seen[way] = {
            "variable": float(variable.numpy()[0]),
            "sums": [s.numpy().tolist() for s in sums],
            "sent": [op.inputs[0].shape.num_elements() for op in sent],
            "early": [op.name for op in sent if not before[op.name] & bit],
        }
    return seen


def test_what_is_summed_beside_gradients_travels_in_their_message_where_it_can(jobs: Jobs) -> None:
    """As each step's loss does: a message of its own would cost each step one more synchronisation of the ranks."""
    first, second = jobs(2)["sums beside"]
    assert first == second
    for way, seen in first.items():
        moved = {"average": -2.5, "fp16": -2.5, "passes": 0.0}.get(way, -5.0)
        assert seen["variable"] == moved, way
        thirds, pair = seen["sums"]
        assert thirds == [float(np.float32(1 / 3) + np.float32(2 / 3))], way  # to the bit: no half precision
        assert pair == [3.0, -3.0], way
        assert seen["early"] == [], way  # nothing before the gradients: Horovod would poll while backward computes
    assert first["plain"]["sent"] == [4]  # the gradient, 1 value, and 3 beside it
    assert first["fixed order"]["sent"] == [4, None]  # to their owners, and the sums to all
    assert all(3 in seen["sent"] for way, seen in first.items() if way not in ("plain", "fixed order"))


def _updates_in_process_set() -> dict[str, float]:
    """A variable after an update on ranks 1 and 2, which average with each other, and on rank 0, which is alone."""
    hvd = nets.start()
    import horovod.keras as hvd_keras
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer, collectives

    pair = hvd.add_process_set([1, 2])
    dense = tf.constant([[hvd.rank() + 1.0]])
    sparse = tf.IndexedSlices(dense, tf.constant([0]), tf.constant([1, 1]))
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "Horovod's": (dense, {}),
        "sparse, fp16": (sparse, {"compression": "fp16"}),
        "fixed order": (dense, {"fixed_order": True}),
    }
    ended = {}
    for way, (gradient, options) in ways.items():
        v = keras.Variable(np.zeros(gradient.shape, "float32"))
        wrap: Any = hvd_keras.DistributedOptimizer if way == "Horovod's" else DistributedOptimizer
        wrap(keras.optimizers.SGD(1.0), process_set=pair, **options).apply([gradient], [v])
        ended[way] = float(v.numpy().mean())
    collectives.barrier()  # rank 0 reduces with no other, and its end would end the others
    return ended


@pytest.mark.slow  # its ranks serve no other test
def test_a_process_set_averages_among_its_members_only() -> None:
    alone, *members = run_ranks(_updates_in_process_set, 3, env={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
    assert alone == dict.fromkeys(alone, -1.0)
    for ended in members:
        assert ended == dict.fromkeys(alone, -2.5)


def _fit(poisoned: bool = False) -> dict[str, Any]:
    """`model.fit` on each rank's own data; returns the weights, and what one process would get on all the data.

    Poisoned: under mixed_float16, with an example on the last rank that is infinite.
    """
    hvd = nets.start()
    import keras

    from hvd_cifar.distributed import DistributedOptimizer, broadcast_variables

    if poisoned:
        keras.mixed_precision.set_global_policy("mixed_float16")
    keras.utils.set_random_seed(hvd.rank())  # ranks begin differently, and must not stay so

    def model(optimizer: Any) -> keras.Model:
        layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1, dtype="float32")]
        net = keras.Sequential([keras.Input((3,)), *layers])
        net.compile(optimizer, loss="mse", jit_compile=hasattr(optimizer, "on_all_ranks"))  # "auto" says so on GPUs
        return net

    draw, size = np.random.default_rng(5), hvd.size()
    x = draw.normal(size=(8 * size, 3)).astype("float32")
    y = draw.normal(size=(8 * size, 1)).astype("float32")
    net = model(DistributedOptimizer(keras.optimizers.Adam(0.05)))
    broadcast_variables(net)
    begins = net.get_weights()
    # Batches of 4 a rank: step k of the job is x[4 * size * k : 4 * size * (k + 1)].
    mine = np.arange(8 * size).reshape(2, -1)[:, hvd.rank() :: size].ravel()
    own = x[mine]
    if poisoned and hvd.rank() == size - 1:
        own[0] = np.inf
    net.fit(own, y[mine], batch_size=4, epochs=3, shuffle=False, verbose=0)

    whole = model(keras.optimizers.Adam(0.05))
    whole.set_weights(begins)
    whole.fit(x, y, batch_size=4 * size, epochs=3, shuffle=False, verbose=0)
    return {
        "optimizer": type(net.optimizer).__name__,
        "begins": np.concatenate([w.ravel() for w in begins]).tolist(),
        "weights": nets.flat(net),
        "alone": nets.flat(whole),
        "updates": int(net.optimizer.iterations.numpy()),
        "scale": float(net.optimizer.dynamic_scale.numpy()) if poisoned else 1.0,
    }


def test_fit_equals_one_process_on_all_the_data(jobs: Jobs) -> None:
    ranks = jobs(3)["fit"]
    for rank in ranks:
        assert rank["begins"] == ranks[0]["begins"]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["updates"] == 6
        assert rank["weights"] != rank["begins"]
        # float32, six Adam steps: sums in another order.
        assert np.allclose(rank["weights"], rank["alone"], rtol=1e-4, atol=1e-5)


def test_ranks_skip_a_step_together_when_one_overflows(jobs: Jobs) -> None:
    """Under mixed_float16 Keras wraps the optimizer in a LossScaleOptimizer; one rank's gradients are not finite."""
    ranks = jobs(2)["overflow"]
    assert [rank["optimizer"] for rank in ranks] == ["LossScaleOptimizer"] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert np.isfinite(ranks[0]["weights"]).all() and ranks[0]["weights"] != ranks[0]["begins"]
    assert ranks[0]["scale"] == ranks[1]["scale"] == 2.0**15 / 2**3  # halved in each of the three epochs
    assert ranks[0]["updates"] == ranks[1]["updates"] == 3
