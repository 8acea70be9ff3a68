"""Copies of an elastic job's state in shared memory: which one ranks restore that start again."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import run_all


def _restored(folder: str, same_host: bool) -> dict[str, Any]:
    """What each rank restores after a rollback that a host missed, and after a rank that died before its copy."""
    import dataclasses

    import keras

    from hvd_cifar.distributed import collectives
    from hvd_cifar.runtime.world import start
    from hvd_cifar.training import state_copy

    world = start()
    own = Path(folder, "host-0" if same_host else f"host-{world.rank}")
    own.mkdir(exist_ok=True)
    vars(state_copy)["own_folder"] = lambda job: own / job
    local = (world.rank, world.size) if same_host else (0, 1)
    world = dataclasses.replace(world, local_rank=local[0], local_size=local[1])
    own_kind = "bfloat16" if same_host else "float32"  # Horovod adds no bfloat16
    weight, mine, rollbacks = (keras.Variable(0, dtype=kind) for kind in ("float32", own_kind, "int64"))
    state: Any = SimpleNamespace(variables=[weight, rollbacks], rollbacks=rollbacks)
    found: dict[str, Any] = {}

    def write(copy: state_copy.StateCopy, step: int) -> None:
        weight.assign(step + world.rank / 10)
        mine.assign(10.0 * step + world.rank)
        copy.write(step)

    def restore(name: str, on_disk: int) -> None:
        collectives.barrier()
        weight.assign(-1.0)
        rollbacks.assign(0)
        again = state_copy.StateCopy(name, state, [mine], world)
        values = [again.restore(on_disk), float(weight.numpy()), float(mine.numpy()), int(rollbacks.numpy())]
        found[name] = [round(value, 5) if isinstance(value, float) else value for value in values]

    for name in ("away", "dead"):
        (own / name).mkdir(exist_ok=True)
    collectives.barrier()
    if not same_host:  # rank 1's host is away from step 100 on; the others go back to step 50 and on to step 60
        copy = state_copy.StateCopy("away", state, [mine], world)
        write(copy, 100)
        if world.rank == 0:
            copy.forget()
            rollbacks.assign(1)
            write(copy, 60)
        restore("away", 50)
    rollbacks.assign(0)
    copy = state_copy.StateCopy("dead", state, [mine], world)
    write(copy, 1)
    if world.rank == 0:  # rank 1 dies before it has copied step 2
        write(copy, 2)
    restore("dead", 0)
    return found


@pytest.fixture(scope="module")
def of_hosts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each of two ranks restored, with a host for each and both on one."""
    folders = [str(tmp_path_factory.mktemp("copies")) for _ in range(2)]
    return run_all({"two": partial(_restored, folders[0], False), "one": partial(_restored, folders[1], True)}, 2)


def test_a_host_that_missed_a_rollback_does_not_undo_it(of_hosts: dict[str, list[Any]]) -> None:
    for found in of_hosts["two"]:
        assert found["away"] == [60, 60.0, 600.0, 1]
        assert found["dead"] == [1, 1.0, 10.5, 0]  # the mean of both ranks' own variables


def test_a_copy_without_a_rank_s_own_variables_is_not_whole(of_hosts: dict[str, list[Any]]) -> None:
    """Both ranks are on one host, which has one copy of the state."""
    for found in of_hosts["one"]:
        assert found["dead"] == [1, 1.0, 10.5, 0]
