"""Broadcast, the start-up proof, sums and shared errors, on real ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks


def _broadcast_everything() -> dict[str, Any]:
    from hvd_cifar.distributed import broadcast_variables, collectives
    from hvd_cifar.runtime.world import start

    world = start()
    import keras

    keras.utils.set_random_seed(world.rank)
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
    net.compile(keras.optimizers.Adam(0.1 * (world.rank + 1)), loss="mse")
    try:
        broadcast_variables(net.optimizer)
        unbuilt = "accepted"
    except ValueError as error:
        unbuilt = str(error)
    net.optimizer.build(net.trainable_variables)
    net.optimizer.variables[2].assign(np.full(net.optimizer.variables[2].shape, world.rank + 1.0))
    odd = [
        keras.Variable(np.asarray([world.rank + 1]), dtype=dtype)
        for dtype in ("bfloat16", "float16", "float64", "uint32", "int64", "uint8", "bool")
    ]
    before = collectives.digest([*net.variables, *net.optimizer.variables, *odd])
    broadcast_variables(net)
    broadcast_variables(odd, root_rank=world.size - 1)
    return {
        "unbuilt": unbuilt,
        "before": before,
        "after": collectives.digest([*net.variables, *net.optimizer.variables]),
        "odd": [float(v.numpy().astype("float64")[0]) for v in odd],
        "types": sorted({str(v.dtype) for v in net.variables}),
        "learning rate": float(net.optimizer.learning_rate.numpy()),
        "slot": float(net.optimizer.variables[2].numpy().ravel()[0]),
    }


@pytest.mark.parametrize("n", [2, 3])
def test_broadcast_makes_all_ranks_alike(n: int) -> None:
    ranks = run_ranks(_broadcast_everything, n)
    assert len({rank["before"] for rank in ranks}) == n
    assert len({rank["after"] for rank in ranks}) == 1
    assert ranks[-1]["learning rate"] == pytest.approx(0.1) and ranks[-1]["slot"] == 1.0
    assert ranks[0]["odd"] == [float(n)] * 6 + [1.0]  # from the last rank
    assert ranks[0]["types"] == ["float32", "int64"]  # the weights, and Dropout's seed
    assert "not built" in ranks[0]["unbuilt"]


def _prove() -> dict[str, str]:
    """What the proof says of several ways to wrap an optimizer."""
    from hvd_cifar.distributed import DistributedOptimizer, prove_averaging
    from hvd_cifar.errors import TrainingError
    from hvd_cifar.runtime.world import start

    world = start()
    import horovod.tensorflow.keras as horovod_keras

    ways = {
        "ours": lambda optimizer: DistributedOptimizer(optimizer),
        "ours in fp16": lambda optimizer: DistributedOptimizer(optimizer, compression="fp16"),
        "ours summing": lambda optimizer: DistributedOptimizer(optimizer, op="sum"),
        "none": lambda optimizer: optimizer,
        "Horovod's own": lambda optimizer: horovod_keras.DistributedOptimizer(optimizer),
        "sum for average": lambda optimizer: DistributedOptimizer(optimizer, op="sum"),
    }
    said = {}
    for how, wrap in ways.items():
        try:
            prove_averaging(wrap, contributions="sum" if how == "ours summing" else "average")
            said[how] = f"proven to {world.size}"
        except TrainingError as error:
            said[how] = str(error)
    return said


@pytest.mark.parametrize("n", [2, 3])
def test_the_proof_passes_with_the_average_and_names_ranks_and_values_without(n: int) -> None:
    ranks = run_ranks(_prove, n)
    assert ranks == [ranks[0]] * n  # every rank goes on, or ends, with the same words
    said = ranks[0]
    assert [said[how] for how in ("ours", "ours in fp16", "ours summing")] == [f"proven to {n}"] * 3
    for how in ("none", "Horovod's own"):
        assert {2: "must end at (-1.5, 2.5)", 3: "must end at (-2, 4.66667)"}[n] in said[how]
        for rank in range(n):
            assert f"rank {rank} ended at ({-(rank + 1)}, {(rank + 1) ** 2})" in said[how]
    assert {2: "rank 1 ended at (-3, 5)", 3: "rank 1 ended at (-6, 14)"}[n] in said["sum for average"]


def _sums_and_errors() -> dict[str, Any]:
    from hvd_cifar.distributed import collectives
    from hvd_cifar.errors import TrainingError, UserError
    from hvd_cifar.runtime.world import start

    world = start()
    import keras

    seen: dict[str, Any] = {}
    seen["sums"] = collectives.all_reduce_sums([world.rank + 1, 1e15 + world.rank, 1 / 3])
    v = keras.Variable(np.full(3, world.rank, "float32"))
    collectives.average_variables([v])
    seen["mean"] = v.numpy().tolist()
    seen["gathered"] = collectives.all_gather_object(f"rank {world.rank}")
    seen["from root"] = collectives.on_root(lambda: f"said by {world.rank}")

    def fail_on_last(kind: type[Exception]) -> str:
        if world.rank == world.size - 1:
            raise kind(f"rank {world.rank} has no data")
        return "fine"

    for kind in (UserError, TrainingError, ZeroDivisionError):
        try:
            seen[kind.__name__] = collectives.on_every_rank(partial(fail_on_last, kind))
        except Exception as error:
            seen[kind.__name__] = f"{type(error).__name__}: {error}"
    try:
        seen["root failed"] = collectives.on_root(lambda: 1 / 0)
    except Exception as error:
        seen["root failed"] = f"{type(error).__name__}: {error}"
    return seen


@pytest.mark.parametrize(("n", "launcher"), [(2, "mpirun"), (3, "mpirun"), (2, "gloo")])
def test_sums_gathers_and_errors_reach_every_rank(n: int, launcher: str) -> None:
    ranks = run_ranks(_sums_and_errors, n, launcher=launcher)
    last = n - 1
    for rank, seen in enumerate(ranks):
        assert seen["sums"] == [n * (n + 1) / 2, n * 1e15 + n * last / 2, pytest.approx(n / 3, rel=1e-15)]
        assert seen["mean"] == [last / 2] * 3
        assert seen["gathered"] == [f"rank {r}" for r in range(n)]
        assert seen["from root"] == "said by 0"
        assert seen["UserError"] == f"UserError: rank {last} has no data"
        assert seen["TrainingError"] == f"TrainingError: rank {last} has no data"
        told = f"TrainingError: rank {last} failed with ZeroDivisionError: rank {last} has no data"
        assert seen["ZeroDivisionError"] == (f"ZeroDivisionError: rank {last} has no data" if rank == last else told)
        told = "TrainingError: rank 0 failed with ZeroDivisionError: division by zero"
        assert seen["root failed"] == ("ZeroDivisionError: division by zero" if rank == 0 else told)


def _meetings_while_idle(timeline: str) -> dict[str, Any]:
    """When Horovod's threads met during 2 s of idleness (us, by rank 0's timeline), and what a sum gives after them."""
    import re
    import time
    from pathlib import Path

    import horovod.tensorflow as hvd

    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import start

    world = start()
    hvd.start_timeline(timeline, mark_cycles=True)
    collectives.all_reduce_sums([1.0])
    time.sleep(2.0)
    hvd.stop_timeline()
    time.sleep(0.3 * world.rank)  # the other rank's sum waits for this one's
    total = collectives.all_reduce_sums([world.rank + 1.0])[0]
    marks = re.findall(r'"CYCLE_START", "ts": (\d+)', Path(timeline).read_text()) if world.rank == 0 else []
    return {"sum": total, "meetings": [int(mark) for mark in marks]}


@pytest.mark.parametrize("launcher", ["mpirun", "gloo"])
def test_a_rank_with_nothing_to_reduce_leaves_its_core_alone(launcher: str, tmp_path: Path) -> None:
    dynamic = {"HOROVOD_TIMELINE": "DYNAMIC"}
    ranks = run_ranks(_meetings_while_idle, 2, str(tmp_path / "timeline.json"), launcher=launcher, env=dynamic)
    assert [rank["sum"] for rank in ranks] == [3.0, 3.0]
    # What the sum brought may still be in the first. A busy machine makes the pauses longer, never shorter.
    pauses = np.diff(ranks[0]["meetings"][1:])
    assert len(pauses) >= 3
    assert min(pauses) >= 49_000  # us
