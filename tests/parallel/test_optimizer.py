"""`DistributedOptimizer` against the average computed by hand, on real ranks."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.ranks import Jobs, once, run_all

LAUNCHES = [(2, "mpirun"), (3, "mpirun"), pytest.param(2, "gloo", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    fit = partial(_fit, mixed=False, poisoned=False)
    functions: dict[tuple[int, str], dict[str, Callable[..., Any]]] = {
        (1, "mpirun"): {
            "wrapped": _wrapped_against_plain,
            "saved": partial(_saved_and_loaded, str(tmp_path_factory.mktemp("saved"))),
        },
        (2, "mpirun"): {
            "several things": _several_things,
            "sums beside": _sums_beside_gradients,
            "fit": fit,
            "overflow": partial(_fit, mixed=True, poisoned=True),
        },
        (3, "mpirun"): {"fit": fit, "process set": _updates_in_process_set},
        (2, "gloo"): {"fit": fit},
    }

    def start(n: int, launcher: str) -> dict[str, list[Any]]:
        dynamic = {"HOROVOD_DYNAMIC_PROCESS_SETS": "1"} if n == 3 else None
        return run_all(functions[n, launcher], n, launcher=launcher, env=dynamic, timeout=900)

    return once(start)


def _start() -> Any:
    from hvd_cifar.runtime.world import start

    return start()


def _optimizers() -> dict[str, Callable[..., Any]]:
    """Every optimizer that Keras ships, by name."""
    import keras

    kinds = {k for k in vars(keras.optimizers).values() if isinstance(k, type)}
    made: dict[str, Callable[..., Any]] = {k.__name__: k for k in kinds if issubclass(k, keras.optimizers.Optimizer)}
    for no_rule_of_its_own in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer"):
        made.pop(no_rule_of_its_own)
    return made


OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "moving averages": {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    "clipped values": {"clipvalue": 0.1},
    "clipped norms": {"clipnorm": 0.1},
    "clipped global norm": {"global_clipnorm": 0.1},
    "gradient accumulation": {"gradient_accumulation_steps": 2},
    "excluded by name": {"weight_decay": 0.1},
    "excluded by variable": {"weight_decay": 0.1},
    "schedule": {},
    "function": {},
    "loss scale": {},
}


def _train_optimizer(kind: Callable[..., Any], option: str, wrapped_after: int | None, graph: bool) -> list[bytes]:
    """Bits of two weights and of the optimizer's variables after each of 4 steps; None: it is never wrapped."""
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    draw = np.random.default_rng(7)
    kernel, bias = (keras.Variable(draw.normal(size=s).astype("float32"), name=f"v{len(s)}") for s in ((3, 2), (2,)))
    rates = {"schedule": keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), "function": lambda: 0.05}
    optimizer = kind(learning_rate=rates.get(option, 0.1), **OPTIONS[option])
    if option == "excluded by name":
        optimizer.exclude_from_weight_decay(var_names=["v1"])
    if option == "excluded by variable":
        optimizer.exclude_from_weight_decay(var_list=[kernel])
    if option == "loss scale":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0, dynamic_growth_steps=2)
    if wrapped_after == -1:  # before it is built
        DistributedOptimizer(optimizer)
    optimizer.build([kernel, bias])

    def apply(*gradients: Any) -> None:
        optimizer.apply(gradients, [kernel, bias])

    bits = []
    for step in range(4):
        if step == wrapped_after:
            DistributedOptimizer(optimizer)
        gradients = [tf.constant(draw.normal(size=v.shape), tf.float32) for v in (kernel, bias)]
        # A new function for each step: one that was traced with the plain optimizer would not reduce.
        (tf.function(apply, autograph=False) if graph else apply)(*gradients)
        bits.append(b"".join(v.numpy().tobytes() for v in [kernel, bias, *optimizer.variables]))
    return bits


def _wrapped_against_plain() -> dict[str, Any]:
    """Where a wrapped optimizer differs from the plain one, on one rank: each kind, and Adam with each option."""
    _start()
    kinds = _optimizers()
    cases = [(kind, "as it is", False) for kind in sorted(kinds)] + [("Adam", option, False) for option in OPTIONS]
    cases += [("Adam", "as it is", True), ("SGD", "loss scale", True)]
    wrong, unlike = [], set()
    for kind, option, graph in cases:
        plain = _train_optimizer(kinds[kind], option, None, graph)
        unlike.add(plain[-1])
        for wrapped_after in (-1, 0, 2):  # 0: built, and before the first step
            if _train_optimizer(kinds[kind], option, wrapped_after, graph) != plain:
                wrong.append(f"{kind}, {option}, wrapped after {wrapped_after}, graph={graph}")
    return {"kinds": sorted(kinds), "cases": len(cases), "unlike": len(unlike), "wrong": wrong}


def test_a_wrapped_optimizer_keeps_the_whole_state_of_the_plain_one(jobs: Jobs) -> None:
    (found,) = jobs(1, "mpirun")["wrapped"]
    assert {"SGD", "Adam", "AdamW", "Muon", "Lion", "Ftrl", "Adafactor"} <= set(found["kinds"])
    assert found["unlike"] > found["cases"] / 2  # the options do something
    assert found["wrong"] == []


def _scaled(rows: Any, scale: float) -> Any:
    import tensorflow as tf

    return tf.IndexedSlices(scale * rows.values, rows.indices, rows.dense_shape)


def _saved_and_loaded(folder: str) -> dict[str, Any]:
    """A model and a checkpoint of a distributed optimizer, beside those of a plain one."""
    _start()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer

    @keras.saving.register_keras_serializable("mine")
    class Own(keras.optimizers.SGD):
        pass

    def seen_of(name: str, optimizer: Any) -> dict[str, Any]:
        keras.utils.set_random_seed(1)
        net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")], name="net")
        net.compile(optimizer, loss="mse", jit_compile=False)
        net.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        net.save(f"{folder}/{name}.keras")
        path = tf.train.Checkpoint(optimizer=optimizer).save(f"{folder}/{name}")
        loaded = keras.models.load_model(f"{folder}/{name}.keras").optimizer
        again = DistributedOptimizer(loaded)
        return {
            "config": optimizer.get_config(),
            "variables": [v.path for v in optimizer.variables],
            "checkpoint": sorted(name for name, _ in tf.train.list_variables(path)),
            "loaded": [v.numpy().tolist() for v in loaded.variables],
            "saved": [v.numpy().tolist() for v in optimizer.variables],
            "same object": again is loaded,
            "name": type(optimizer).__name__,
            "distributed": again is not None and hasattr(again, "on_all_ranks"),
        }

    found: dict[str, Any] = {}
    for kind in (keras.optimizers.AdamW, Own):
        found[f"plain {kind.__name__}"] = seen_of("plain", kind(0.1, name="the_optimizer"))
        wrapped = DistributedOptimizer(kind(0.1, name="the_optimizer"), backward_passes_per_step=1)
        found[f"wrapped {kind.__name__}"] = seen_of("wrapped", wrapped)
    summing = DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    summing.build([keras.Variable([1.0])])
    found["of passes"] = [v.path for v in summing.variables]
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0], [3.0]]), tf.constant([1, 2, 1]), tf.constant([3, 1]))
    for way, gradient in (("rows", rows), ("as dense", rows), ("dense", tf.convert_to_tensor(rows))):
        table = keras.Variable(np.zeros((3, 1), "float32"))
        adam = keras.optimizers.Adam(0.1, beta_1=0.5, beta_2=0.5)
        optimizer = DistributedOptimizer(adam, sparse_as_dense=way == "as dense")
        for scale in (1.0, 0.1):
            optimizer.apply([scale * gradient if way == "dense" else _scaled(gradient, scale)], [table])
        found[f"table of {way}"] = table.numpy().ravel().tolist()
    many = tf.IndexedSlices(tf.fill((2000, 1), tf.constant(0.01, tf.bfloat16)), tf.zeros(2000, tf.int32), (1, 1))
    table = keras.Variable(np.zeros((1, 1)), dtype="bfloat16")
    DistributedOptimizer(keras.optimizers.SGD(1.0)).apply([many], [table])
    found["many rows"] = float(table.numpy()[0, 0])
    outer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    found["loss scale stays outside"] = DistributedOptimizer(outer) is outer
    pair, gradient_of = [keras.Variable([1.0]), keras.Variable([1.0])], tf.constant([1.0])
    by_turns = DistributedOptimizer(keras.optimizers.SGD(0.05), backward_passes_per_step=2)
    for _ in range(2):  # an update of one of them, whole
        by_turns.apply([gradient_of, None], pair)
    found["next passes"] = [float(v.numpy()[0]) for v in pair]
    by_turns.apply([gradient_of, gradient_of], pair)
    errors = {
        "another pass": lambda: by_turns.apply([None, gradient_of], pair),
        "twice": lambda: DistributedOptimizer(summing),
        "twice inside": lambda: DistributedOptimizer(outer),
        "no optimizer": lambda: DistributedOptimizer("adam"),
        "op": lambda: DistributedOptimizer(keras.optimizers.SGD(), op="mean"),
        "passes": lambda: DistributedOptimizer(keras.optimizers.SGD(), backward_passes_per_step=0),
        "compression": lambda: DistributedOptimizer(keras.optimizers.SGD(), compression="bf16"),
        "other variables": lambda: summing.apply([tf.constant(1.0)], [keras.Variable(0.0)]),
        "process set": lambda: DistributedOptimizer(keras.optimizers.SGD(), process_set=hvd.ProcessSet([0])),
        "copy": lambda: copy.copy(summing),
        "copy of a loss scale": lambda: copy.copy(outer),
        "deep copy": lambda: copy.deepcopy(summing),
        "pickle": lambda: pickle.dumps(summing),
    }
    for name, call in errors.items():
        try:
            found[name] = str(call())
        except (TypeError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_distributed_optimizer_saves_as_the_plain_one(jobs: Jobs) -> None:
    (found,) = jobs(1, "mpirun")["saved"]
    for kind in ("AdamW", "Own"):
        plain, wrapped = found[f"plain {kind}"], found[f"wrapped {kind}"]
        assert wrapped["loaded"] == wrapped["saved"] and len(wrapped["loaded"]) > 1
        for what in ("config", "variables", "checkpoint", "loaded"):
            assert wrapped[what] == plain[what], what
        assert wrapped["same object"] and wrapped["distributed"]
    assert found["wrapped AdamW"]["name"] == "AdamW"
    assert [path.split("/")[-1] for path in found["of passes"]] == ["iteration", "learning_rate"]
    assert found["table of rows"] == pytest.approx(found["table of dense"], rel=1e-6)
    assert found["table of as dense"] == found["table of dense"]
    assert found["many rows"] == pytest.approx(-20, rel=0.01)
    assert found["loss scale stays outside"]
    for way in ("copy", "copy of a loss scale", "deep copy", "pickle"):
        assert found[way].startswith("TypeError: a DistributedOptimizer cannot be copied or pickled")
    assert found["twice"] == found["twice inside"]
    assert "already distributed" in found["twice"]
    assert "Keras 3 optimizer, not str" in found["no optimizer"]
    assert "compression is 'bf16': it must be one of none, fp16" in found["compression"]
    assert "'mean'" in found["op"] and "at least 1" in found["passes"]
    assert "Unknown variable" in found["other variables"] and "is not registered" in found["process set"]
    assert "only some have one of variable" in found["another pass"] and found["next passes"] == pytest.approx(
        [0.9, 1.0]
    )


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 512])
@pytest.mark.parametrize("average", [False, True])
def test_what_half_precision_loses_does_not_depend_on_the_number_of_ranks(ranks: int, average: bool) -> None:
    """Of gradients between the smallest half and 128, shares over 512 ranks underflow only where one rank's do."""
    import tensorflow as tf

    from hvd_cifar.distributed.reduction import Reduction, pack, unpack

    draw = np.random.default_rng(2)
    reduction = Reduction(average=average, compression="fp16")
    gradients = (draw.choice([-1, 1], 4000) * 2.0 ** draw.uniform(-27, 6, 4000)).astype(np.float32)
    on_one_rank = gradients.astype(np.float16)
    assert 0 < (on_one_rank == 0).sum() < 1000
    share = gradients if average else gradients / np.float32(ranks)
    packed = pack(tf.constant(share), reduction, ranks).numpy()
    assert packed.dtype == np.float16
    # A third times three may be the next float32, and so the next half, where the rounding is a tie.
    assert (packed == on_one_rank).mean() > (0.999 if ranks == 3 else 0.9999)
    assert np.array_equal(packed == 0, on_one_rank == 0)
    total = np.zeros(4000, np.float16)
    for _ in range(ranks):  # as MPI adds halves: each sum is rounded
        total = (total.astype(np.float32) + packed).astype(np.float16)
    assert np.isfinite(total).all()  # up to 65504 / 512
    mean = unpack(tf.constant(total), tf.float32, reduction, ranks).numpy()
    assert mean.dtype == np.float32
    assert np.array_equal(mean == 0, on_one_rank == 0)
    assert np.allclose(mean, on_one_rank.astype(np.float32), rtol=0.2, atol=0)  # 511 roundings


def _updating_types(optimizer: Any, variables: Any, rank: int) -> Callable[[], list[Any]]:
    import tensorflow as tf

    from hvd_cifar.distributed.optimizer import apply_and_sum

    def update() -> list[Any]:
        gradients = [tf.fill(v.shape, tf.constant((rank + 1.0) * (i + 1), v.dtype)) for i, v in enumerate(variables)]
        values = [tf.constant([rank], tf.float64), tf.constant(rank + 0.5, tf.float32)]
        return apply_and_sum(optimizer, gradients, variables, values)

    return tf.function(update, autograph=False)


def _several_things() -> dict[str, Any]:
    """What becomes of gradients of many kinds on two ranks."""
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

    # A share too small for half precision, of a mean that it can hold. Dense, sparse, in fixed order.
    least = 2.0**-24
    share = tf.constant([least / world.size])
    least_ways: list[tuple[str, dict[str, Any], Any]] = [
        ("dense", {}, share),
        ("sparse", {}, tf.IndexedSlices(share[:, None], tf.constant([0]), tf.constant([1, 1]))),
        ("fixed order", {"fixed_order": True}, share),
    ]
    for way, options, gradient in least_ways:
        v = variable([[0.0]] if way == "sparse" else [0.0])
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", compression="fp16", **options)
        optimizer.apply([gradient], [v])
        seen[f"least share, {way}"] = float(v.numpy().ravel()[0]) / least

    # Gradients of several types, by every way to reduce them.
    types = ("float32", "float64", "bfloat16", "float16", "float32")
    ways_of_types: dict[str, dict[str, Any]] = {
        "plain": {"op": "sum"},
        "average": {},
        "fp16": {"compression": "fp16"},
        "fixed order": {"op": "sum", "fixed_order": True},
        "passes": {"op": "sum", "backward_passes_per_step": 2},
    }
    for way, options in ways_of_types.items():
        several = [variable([0.0] * (i + 1), dtype) for i, dtype in enumerate(types)]
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.build(several)

        step = _updating_types(optimizer, several, rank)
        for _ in range(options.get("backward_passes_per_step", 1)):
            sums = step()
        seen[f"types, {way}"] = [v.numpy().astype("float64").tolist() for v in several]
        seen[f"sums, {way}"] = [float(total.numpy().sum()) for total in sums]

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
        plain = keras.optimizers.SGD(1.0)
        if average:  # wrapped after it is built
            plain.build([v])
        optimizer = DistributedOptimizer(plain, backward_passes_per_step=2, average_aggregated_gradients=average)
        optimizer.build([v])
        step = tf.function(optimizer.apply)
        path = []
        for k in range(5):
            step([tf.constant([(rank + 1.0) * (k + 1)])])
            path.append(float(v.numpy()[0]))
        seen[f"passes averaged={average}"] = path
        seen["updates"] = int(optimizer.iterations.numpy())

    # Many passes in half precision, each less than a bit of their sum.
    half = variable([0.0], "bfloat16")
    many = DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=1000)
    many.build([half])
    one = tf.function(lambda: many.apply([tf.constant([2.0**-9], tf.bfloat16)], [half]))
    for _ in range(1000):
        one()
    seen["many passes"] = float(half.numpy()[0])

    # Clipping by the global norm comes after averaging.
    v = variable([0.0, 0.0])
    gradient = tf.constant([6.0, 0.0]) if rank == 0 else tf.constant([0.0, 8.0])
    DistributedOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=1.0)).apply([gradient], [v])
    seen["clipped"] = v.numpy().tolist()
    return seen


def test_two_ranks_in_all_variants(jobs: Jobs) -> None:
    first, second = jobs(2, "mpirun")["several things"]
    assert first == second
    assert first["fp16"] == -float(np.float16(1 / 3))
    for way in ("dense", "sparse", "fixed order"):
        assert first[f"least share, {way}"] == -1.0, way
    for way, factor in {"plain": 3.0, "average": 1.5, "fp16": 1.5, "fixed order": 3.0, "passes": 6.0}.items():
        assert first[f"types, {way}"] == [[-factor * (i + 1)] * (i + 1) for i in range(5)], way
        assert first[f"sums, {way}"] == [1.0, 2.0], way
    assert first["bfloat16"] == -1.5
    assert first["dense beside sparse"] == -1.5
    assert first["sparse"] == first["sparse as dense"] == [-0.5, -1.5, -1.0, 0.0]
    assert first["beside None"] == [-1.5, 5.0]
    assert first["passes averaged=False"] == [0.0, -4.5, -4.5, -15.0, -15.0]
    assert first["passes averaged=True"] == [0.0, -2.25, -2.25, -7.5, -7.5]
    assert first["updates"] == 2
    assert first["many passes"] == pytest.approx(-1000 / 512, rel=0.01)
    assert first["clipped"] == pytest.approx([-0.6, -0.8])


def _sums_beside_gradients() -> dict[str, Any]:
    """`apply_and_sum` in a graph, by all ways: variable, sums, and the order of the messages."""
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
            "sent": [op.inputs[0].shape.num_elements() for op in sent],
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
    """Names of the operations that one depends on, by data or by control."""
    found: set[str] = set()
    waiting = [op]
    while waiting:
        for other in [*(tensor.op for tensor in waiting[-1].inputs), *waiting.pop().control_inputs]:
            if other.name not in found:
                found.add(other.name)
                waiting.append(other)
    return found


def test_what_is_summed_beside_gradients_travels_in_their_message_where_it_can(jobs: Jobs) -> None:
    """As each step's loss does: a message of its own would cost each step one more synchronisation of the ranks."""
    first, second = jobs(2, "mpirun")["sums beside"]
    assert first == second
    for way, seen in first.items():
        moved = {"average": -2.5, "passes": 0.0}.get(way, -5.0)
        assert seen["variable"] == moved, way
        thirds, pair = seen["sums"]
        assert thirds == [float(np.float32(1 / 3) + np.float32(2 / 3))], way  # to the bit: no half precision
        assert pair == [3.0, -3.0], way
        assert seen["early"] == [], way  # nothing before the gradients: Horovod would poll while backward computes
    assert first["sum"]["sent"] == [4]  # the gradient, 1 value, and 3 beside it
    assert first["fixed order"]["sent"] == [4, None]  # to their owners, and the sums to all
    assert all(3 in seen["sent"] for way, seen in first.items() if way not in ("sum", "fixed order"))


def _updates_in_process_set() -> dict[str, float]:
    """A variable after an update on ranks 1 and 2, which average with each other, and on rank 0, which is alone."""
    world = _start()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import DistributedOptimizer, collectives

    pair = hvd.add_process_set([1, 2])
    dense = tf.constant([[world.rank + 1.0]])
    sparse = tf.IndexedSlices(dense, tf.constant([0]), tf.constant([1, 1]))
    long = tf.fill([5000, 1], world.rank + 1.0)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "dense": (dense, {}),
        "dense, fp16": (dense, {"compression": "fp16"}),
        "dense, fp16 shares": (dense / 2, {"compression": "fp16", "op": "sum"}),
        "sparse": (sparse, {}),
        "sparse, fp16": (sparse, {"compression": "fp16"}),
        "sparse as dense": (sparse, {"sparse_as_dense": True}),
        "fixed order": (dense, {"fixed_order": True}),
        "fixed order, fp16": (dense, {"fixed_order": True, "compression": "fp16"}),
        "fixed order, sparse": (sparse, {"fixed_order": True}),
        "fixed order, long": (long, {"fixed_order": True}),
    }
    ended = {}
    for way, (gradient, options) in ways.items():
        v = keras.Variable(np.zeros(gradient.shape, "float32"))
        DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair, **options).apply([gradient], [v])
        ended[way] = float(v.numpy().mean()) if way != "dense, fp16 shares" or world.rank else -1.0
    collectives.barrier()  # rank 0 reduces with no other, and its end would end the others
    return ended


def test_a_process_set_averages_among_its_members_only(jobs: Jobs) -> None:
    alone, *members = jobs(3, "mpirun")["process set"]
    assert alone == dict.fromkeys(alone, -1.0)
    for ended in members:
        assert ended == dict.fromkeys(alone, -2.5)


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
def test_fit_equals_one_process_on_all_the_data(n: int, launcher: str, jobs: Jobs) -> None:
    ranks = jobs(n, launcher)["fit"]
    for rank in ranks:
        assert rank["start"] == ranks[0]["start"]
        assert rank["weights"] == ranks[0]["weights"]
        assert rank["updates"] == 6
        assert rank["weights"] != rank["start"]
        # float32, six Adam steps: sums in another order.
        assert np.allclose(rank["weights"], rank["alone"], rtol=1e-4, atol=1e-5)


def test_ranks_skip_a_step_together_when_one_overflows(jobs: Jobs) -> None:
    """Under mixed_float16 Keras wraps the optimizer in a LossScaleOptimizer; one rank's gradients are not finite."""
    ranks = jobs(2, "mpirun")["overflow"]
    assert [rank["optimizer"] for rank in ranks] == ["LossScaleOptimizer"] * 2
    assert ranks[0]["weights"] == ranks[1]["weights"]
    assert np.isfinite(ranks[0]["weights"]).all() and ranks[0]["weights"] != ranks[0]["start"]
    assert ranks[0]["scale"] == ranks[1]["scale"] == 2.0**15 / 2**3  # halved in each of the three epochs
    assert ranks[0]["updates"] == ranks[1]["updates"] == 3
