"""Broadcast, the start-up proof, sums and shared errors, on real ranks."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.ranks import Jobs, error_of, run_all, run_ranks


@pytest.fixture(scope="module")
def jobs() -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""
    proof, more_proof = (partial(_prove, ways) for ways in (list(WAYS), OF_TRAIN))
    functions: dict[int, dict[str, Callable[..., Any]]] = {
        2: {"proof": proof, "broken": _prove_broken, "unlike": _unlike, "graphs": _graphs},
        3: {"proof": more_proof, "broadcast": _broadcast_everything, "sums": _sums_and_errors},
    }
    return cache(lambda n: run_all(functions[n], n, timeout=300))


def _broadcast_everything() -> dict[str, Any]:
    from hvd_cifar.distributed import broadcast_variables, collectives
    from hvd_cifar.runtime.world import start

    world = start()
    import keras

    keras.utils.set_random_seed(world.rank)
    norm = keras.layers.Normalization()
    norm.adapt(np.arange(12.0).reshape(4, 3) * (world.rank + 1))
    layers = [norm, keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(2)]
    net = keras.Sequential([keras.Input((3,)), *layers])
    net.compile(keras.optimizers.Adam(0.1 * (world.rank + 1)), loss="mse")

    class Several(keras.Model):  # such as a GAN: never called itself
        def __init__(self, *models: Any) -> None:
            super().__init__()
            self.models = list(models)

    built = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    targets = {
        "an optimizer": net.optimizer,
        "a head": Several(built, keras.layers.Dense(2, name="head")),
        "built nets": Several(built),
    }
    unbuilt = {what: error_of(broadcast_variables, target) for what, target in targets.items()}
    net.optimizer.build(net.trainable_variables)
    net.optimizer.variables[2].assign(np.full(net.optimizer.variables[2].shape, world.rank + 1.0))
    odd = [
        keras.Variable(np.asarray([world.rank + 1]), dtype=dtype)
        for dtype in ("bfloat16", "float16", "float64", "uint32", "int64", "uint8", "bool")
    ]
    before = collectives.digest([*net.variables, *net.optimizer.variables, *odd])
    broadcast_variables(net)
    broadcast_variables(odd, root_rank=world.size - 1)
    drawn = collectives.random_states(net)
    weights = [v for v in net.variables if all(v is not state for state in drawn)]
    return {
        "unbuilt": unbuilt,
        "before": before,
        "after": collectives.digest([*weights, *net.optimizer.variables]),
        "outputs": net(np.ones((1, 3), np.float32)).numpy().tolist(),
        "seed": int(drawn[0].numpy()[0]),
        "odd": [float(v.numpy().astype("float64")[0]) for v in odd],
        "learning rate": float(net.optimizer.learning_rate.numpy()),
        "slot": float(net.optimizer.variables[2].numpy().ravel()[0]),
    }


def test_broadcast_makes_all_ranks_alike(jobs: Jobs) -> None:
    ranks = jobs(3)["broadcast"]
    assert len({rank["before"] for rank in ranks}) == 3
    assert len({rank["after"] for rank in ranks}) == 1
    assert all(rank["outputs"] == ranks[0]["outputs"] for rank in ranks)
    assert len({rank["seed"] for rank in ranks}) == 3  # ranks drop other units
    assert ranks[-1]["learning rate"] == pytest.approx(0.1) and ranks[-1]["slot"] == 1.0
    assert ranks[0]["odd"] == [3.0] * 6 + [1.0]  # from the last rank
    for rank in ranks:
        assert rank["unbuilt"].pop("built nets") == "accepted"
        assert all("not built yet" in told for told in rank["unbuilt"].values())
        assert "the layer head is" in rank["unbuilt"]["a head"]


def _unlike() -> dict[str, str]:
    """What `broadcast_variables` says of ranks that do not have the same."""
    from hvd_cifar.distributed import broadcast_variables
    from hvd_cifar.runtime.world import start

    rank = start().rank
    import keras

    def net() -> Any:
        made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        made.compile(keras.optimizers.Adam())
        return made

    def table(*words: str) -> Any:
        return keras.Sequential([keras.Input((), dtype="string"), keras.layers.StringLookup(vocabulary=list(words))])

    def variable(values: int) -> Any:
        return keras.Variable(np.zeros(values), dtype="float32", name="grown")

    half_built = net()
    if rank == 0:
        half_built.optimizer.build(half_built.trainable_variables)
    targets = {
        "optimizer": half_built,
        "shapes": [variable(2), variable(2 + rank)],
        "types": [keras.Variable(np.zeros(2), dtype=("float32", "float64")[rank])],
        "counts": [variable(2) for _ in range(1 + rank)],
        "tables": table("a", "bc"[rank]),
        "same": table("a", "b"),
    }
    return {name: error_of(broadcast_variables, target) for name, target in targets.items()}


def test_ranks_that_would_broadcast_other_variables_say_which(jobs: Jobs) -> None:
    first, second = jobs(2)["unlike"]
    assert first == second
    built = "the optimizer is built on rank 0, and not built on rank 1: call model.optimizer.build("
    assert built in first["optimizer"]
    assert "variable grown is float32 (2,) on rank 0, and float32 (3,) on rank 1: build" in first["shapes"]
    assert "is float32 (2,) on rank 0, and float64 (2,) on rank 1: build the same" in first["types"]
    assert "is missing on rank 0, and float32 (2,) on rank 1: build the same" in first["counts"]
    assert "the table of layer string_lookup is of SHA-256 " in first["tables"]
    assert first["same"] == "accepted"


def _graphs() -> dict[str, Any]:
    """Sums and gradients in graphs that have more operations on rank 1; and what AutoGraph says of them."""
    from hvd_cifar.distributed import DistributedOptimizer, collectives
    from hvd_cifar.runtime.world import start

    rank = start().rank
    import keras
    import tensorflow as tf

    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    tf.get_logger().addHandler(handler)
    captured = [tf.constant(float(rank + i)) for i in range(1 + 5 * rank)][-1] * 0.0 + float(rank + 1)
    variables = [keras.Variable(np.zeros(2, "float32")), keras.Variable(np.zeros((3, 1), "float32"))]
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "in order": {"fixed_order": True},
        "passes": {"backward_passes_per_step": 2},
    }
    for name, options in ways.items():
        optimizer = DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum", **options)
        optimizer.build(variables)
        for variable in variables:
            variable.assign(tf.zeros_like(variable.value))

        @tf.function  # with AutoGraph, as a user's own
        def step(optimizer: Any = optimizer, sparse: bool = name == "plain") -> Any:
            x = captured
            for _ in range(3 * rank):
                x = tf.cond(x > 0, lambda x=x: x * 1.0, lambda x=x: x)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = collectives.all_reduce_in_graph(x) ** 2
            rows = tf.IndexedSlices(tf.reshape(x, [1, 1]), tf.constant([1]), tf.constant([3, 1]))
            optimizer.apply([tf.fill([2], x), rows if sparse else tf.fill([3, 1], x)], variables)
            return total, tape.gradient(total, x)

        for _ in range(options.get("backward_passes_per_step", 1)):
            sums = step()
        found[name] = [float(v) for v in sums] + [float(v.numpy().ravel()[1]) for v in variables]
    tf.get_logger().removeHandler(handler)
    return {"found": found, "told": [text for text in told if "AutoGraph" in text]}


def test_ranks_meet_whatever_else_their_graphs_hold(jobs: Jobs) -> None:
    for rank in jobs(2)["graphs"]:
        # (1 + 2)^2; each rank's value changes both ranks' totals, of slope 2 * 3 each; and minus the sum of gradients.
        once = [9.0, 12.0, -3.0, -3.0]
        assert rank["found"] == {"plain": once, "in order": once, "passes": [9.0, 12.0, -6.0, -6.0]}
        assert rank["told"] == []


TWO = {"backward_passes_per_step": 2}
# Arguments of `DistributedOptimizer`, by all that changes the way of a gradient.
WAYS: dict[str, dict[str, Any]] = {
    "average": {},
    "average, fixed order": {"fixed_order": True},
    "average, passes": TWO,
    "sum": {"op": "sum"},
    "sum, fp16": {"op": "sum", "compression": "fp16"},
    "sum, fixed order": {"op": "sum", "fixed_order": True},
    "sum, fixed order, fp16": {"op": "sum", "fixed_order": True, "compression": "fp16"},
    "sum, loss scale, fp16": {"op": "sum", "compression": "fp16"},
    "sum, fixed order, float64": {"op": "sum", "fixed_order": True},
    "sum, averaged passes": {"op": "sum", **TWO, "average_aggregated_gradients": True},
    "sum, passes, loss scale": {"op": "sum", **TWO},
}
OF_TRAIN = [way for way in WAYS if way.startswith("sum") and "passes" not in way]  # what `train` can ask for
# Variables whose gradients take the all-to-all of the fixed order, and one of fewer elements than there are ranks.
LONG, SHORT = ((4097,), (2, 3)), ((1,),)


def _prove_way(way: str) -> str:
    """The proof's result for one way to wrap an optimizer."""
    import keras

    from hvd_cifar.distributed import DistributedOptimizer, prove_averaging

    keras.config.set_floatx("float64" if "float64" in way else "float32")
    said = ""
    for shapes in (LONG, SHORT):
        optimizer: Any = DistributedOptimizer(keras.optimizers.SGD(1.0), **WAYS[way])
        if "loss scale" in way:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        variables = [keras.Variable(np.full(shape, 0.5)) for shape in shapes]
        optimizer.build(variables)
        before = [v.numpy().tolist() for v in (*variables, *optimizer.variables)]
        said = prove_averaging(optimizer, contributions=WAYS[way].get("op", "average"))
        if before != [v.numpy().tolist() for v in (*variables, *optimizer.variables)]:
            return "the proof has changed the state"
    return said


def _prove(ways: list[str]) -> dict[str, str]:
    """The proof's results for several ways to wrap an optimizer."""
    from hvd_cifar.distributed import DistributedOptimizer, prove_averaging
    from hvd_cifar.runtime.world import start

    start()
    import horovod.tensorflow.keras as horovod_keras
    import keras

    said = {way: _prove_way(way) for way in ways}
    keras.config.set_floatx("float32")
    for how, wrap in {
        "none": lambda optimizer: optimizer,
        "Horovod's own": lambda optimizer: horovod_keras.DistributedOptimizer(optimizer),
        "sum for average": lambda optimizer: DistributedOptimizer(optimizer, op="sum"),
    }.items():
        optimizer = wrap(keras.optimizers.SGD(1.0))
        optimizer.build([keras.Variable(np.zeros(3))])
        said[how] = error_of(prove_averaging, optimizer)
    return said


@pytest.mark.parametrize(("n", "ways"), [(2, list(WAYS)), (3, OF_TRAIN)])
def test_the_proof_passes_with_the_average_and_names_ranks_and_values_without(
    n: int, ways: list[str], jobs: Jobs
) -> None:
    ranks = jobs(n)["proof"]
    assert ranks == [ranks[0]] * n  # every rank goes on, or ends, with the same words
    said = ranks[0]
    assert said["Horovod's own"] == "accepted"
    for way in ways:
        assert said[way] == f"gradients of which each rank has a part became their average, on all {n} ranks", way
    assert "gradients are not averaged over the ranks: SGD is not distributed; wrap" in said["none"]
    wrong = f"what must be {1 / n:.6g} is 1 where the gradient is rank 0's, on rank 0; wrap"
    assert wrong in said["sum for average"]


def _prove_broken() -> dict[str, dict[str, str]]:
    """The proof's errors where one part of the path at a time does not reduce."""
    from hvd_cifar.runtime.world import start

    start()
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import optimizer, reduction

    all_reduce, pack = reduction.all_reduce, reduction.pack

    def plain(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        keras.optimizers.SGD.apply(self, grads, trainable_variables)

    def without_rank_1(tensors: Any, *how: Any) -> Any:
        return all_reduce([t * tf.cast(hvd.rank() != 1, t.dtype) for t in tensors], *how)

    def in_tree(message: Any, ranks: Any) -> Any:
        return message

    fp16 = "sum, loss scale, fp16"
    breaks: dict[str, tuple[Any, str, Any, list[str]]] = {
        "apply": (optimizer.Distributed, "apply", plain, ["average, passes", fp16]),
        "fixed order": (reduction, "all_reduce_in_tree", in_tree, ["sum, fixed order", "average, fixed order"]),
        "values": (optimizer, "all_reduce", lambda tensors, *how: list(tensors), ["average"]),
        "half precision": (reduction, "pack", lambda gradient, how, ranks: pack(gradient, how, 1), [fp16]),
        "a lost rank": (reduction, "all_reduce", without_rank_1, ["average", "sum, fixed order, fp16"]),
    }
    said: dict[str, dict[str, str]] = {}
    for part, (owner, name, broken, ways) in breaks.items():
        with mock.patch.object(owner, name, broken):
            said[part] = {way: error_of(_prove_way, way) for way in ways}
    return said


def test_the_proof_fails_where_any_part_of_the_path_does_not_reduce(jobs: Jobs) -> None:
    first, second = jobs(2)["broken"]
    assert first == second
    for part, said in first.items():
        for way, text in said.items():
            what = "values beside the gradients are not summed" if part == "values" else "gradients are not averaged"
            assert text.startswith(f"TrainingError: {what} over the ranks"), (part, way, text)
            assert part != "a lost rank" or "is 0 where the gradient is rank 1's, on rank 0; wrap" in text, (way, text)


def _sums_and_errors() -> dict[str, Any]:
    from hvd_cifar.distributed import collectives
    from hvd_cifar.distributed.errors import TrainingError
    from hvd_cifar.distributed.reduction import average_variables
    from hvd_cifar.runtime.world import start

    class OwnTrainingError(TrainingError):
        pass

    world = start()
    import keras

    seen: dict[str, Any] = {}
    seen["sums"] = collectives.all_reduce_sums([world.rank + 1, 1e15 + world.rank, 1 / 3])
    variables = [keras.Variable(np.full(3, world.rank), dtype=dtype) for dtype in ("float32", "bfloat16", "float64")]
    average_variables(variables)
    seen["means"] = [np.asarray(each, np.float64).tolist() for each in variables]
    seen["gathered"] = collectives.all_gather_object(f"rank {world.rank}")
    seen["host by host"] = collectives.host_by_host(time.time)
    seen["from root"] = collectives.on_root(lambda: f"said by {world.rank}")

    def fail(kind: type[Exception]) -> None:
        if world.rank > 0:
            try:
                raise KeyError("cause")
            except KeyError as cause:
                raise kind(f"of rank {world.rank}") from cause

    for kind in (OwnTrainingError, ZeroDivisionError):
        try:
            collectives.on_every_rank(partial(fail, kind))
        except Exception as error:
            seen[kind.__name__] = [type(error).__name__, str(error), type(error.__cause__).__name__]
    seen["root failed"] = error_of(collectives.on_root, lambda: 1 / 0)
    return seen


def test_sums_gathers_and_errors_reach_every_rank(jobs: Jobs) -> None:
    ranks = jobs(3)["sums"]
    for rank, seen in enumerate(ranks):
        assert seen["sums"] == [6, 3e15 + 3, pytest.approx(1, rel=1e-15)]
        assert seen["means"] == [[1.0] * 3] * 3
        assert seen["gathered"] == ["rank 0", "rank 1", "rank 2"]
        assert seen["from root"] == "said by 0"
        assert rank == 0 or ranks[0]["host by host"] < seen["host by host"]
        # A rank that failed keeps its own error; the others have the text of the first that failed.
        for kind, others in (
            ("OwnTrainingError", ["TrainingError", "of rank 1", "NoneType"]),
            ("ZeroDivisionError", ["TrainingError", "rank 1 failed with ZeroDivisionError: of rank 1", "NoneType"]),
        ):
            assert seen[kind] == ([kind, f"of rank {rank}", "KeyError"] if rank else others)
        told = "TrainingError: rank 0 failed with ZeroDivisionError: division by zero"
        assert seen["root failed"] == ("ZeroDivisionError: division by zero" if rank == 0 else told)


def _cycles_while_idle(timeline: str) -> list[int]:
    """The times of Horovod's cycles in 2 s of idleness (us), by rank 0's timeline."""
    import horovod.tensorflow as hvd

    from hvd_cifar.runtime.world import start

    world = start()
    hvd.start_timeline(timeline, mark_cycles=True)
    for _ in range(100):  # a machine that stalls cuts one of them short
        time.sleep(0.02)
    hvd.stop_timeline()
    found = re.findall(r'"CYCLE_START", "ts": (\d+)', Path(timeline).read_text()) if world.rank == 0 else []
    return [int(mark) for mark in found]


@pytest.mark.slow
def test_a_rank_with_nothing_to_reduce_leaves_its_core_alone(tmp_path: Path) -> None:
    cycles, _ = run_ranks(_cycles_while_idle, 2, str(tmp_path / "timeline.json"), env={"HOROVOD_TIMELINE": "DYNAMIC"})
    pauses = np.diff(cycles)  # a busy machine makes them longer
    assert len(pauses) >= 3
    assert np.median(pauses) >= 49_000  # us
