"""Copies of an elastic job's state in shared memory: which one ranks restore that start again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.ranks import run_ranks


def _restored(folder: str) -> dict[str, Any]:
    """What each rank restores, with a host each, after a host was away, and after a rank has died."""
    import dataclasses

    import keras

    from hvd_cifar.distributed import collectives
    from hvd_cifar.extensions import elastic_copies
    from hvd_cifar.runtime.world import start
    from hvd_cifar.training.state import TrainState

    world = start()
    own = Path(folder, f"host-{world.rank}")
    own.mkdir()
    vars(elastic_copies)["own_folder"] = lambda job: own / job
    world = dataclasses.replace(world, local_rank=0, local_size=1)
    state = TrainState(keras.Sequential([keras.Input((1,))]))
    weight, mine = keras.Variable(0, dtype="float32"), keras.Variable(0, dtype="bfloat16")
    state.add("weight", [weight])
    state.add("mine", [mine], "own")
    found: dict[str, Any] = {}

    def run_of(name: str) -> tuple[Any, Any]:
        here = dataclasses.replace(world, elastic=SimpleNamespace(name=name))  # type: ignore[arg-type]
        run = SimpleNamespace(world=here, state=state, ranks=collectives, tell=lambda event: None, step=0)
        return elastic_copies.ElasticCopies(), run

    def write(copies: Any, run: Any, step: int) -> None:
        weight.assign(step + world.rank / 10)
        mine.assign(10.0 * step + world.rank)
        state.step.assign(step)
        run.step = step
        copies.on_step(run)

    def restore(name: str, on_disk: int) -> None:
        collectives.barrier()
        weight.assign(-1.0)
        state.step.assign(on_disk)
        again, run = run_of(name)
        assert again.on_restore(run) == "memory"
        found[name] = [float(v.numpy()) for v in (state.step, weight, mine)]

    for name in ("away", "dead"):
        (own / name).mkdir()
    # Rank 1's host is away from step 50 on.
    copies, run = run_of("away")
    assert copies.on_restore(run) is None
    write(copies, run, 50)
    if world.rank == 0:
        write(copies, run, 51)
        write(copies, run, 60)
    restore("away", 50)
    state.step.assign(0)
    copies, run = run_of("dead")
    assert copies.on_restore(run) is None
    write(copies, run, 1)
    if world.rank == 0:  # rank 1 dies before it has copied step 2
        write(copies, run, 2)
    restore("dead", 0)
    again, run = run_of("dead")
    found["later on disk"] = again.on_restore(run)
    return found


def test_ranks_restore_the_newest_copy(tmp_path: Path) -> None:
    for found in run_ranks(_restored, 2, str(tmp_path)):
        assert found == {"away": [60, 60, 600], "dead": [2, 2, 20], "later on disk": None}
