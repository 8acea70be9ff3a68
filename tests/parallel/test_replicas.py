"""Ranks that drift apart are found and named, and are stopped or resynced; equal ranks pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.options import FEW, SMALL_NET
from tests.ranks import Jobs, command, run_all

# Options that check the ranks, and the step after which they find the drift.
CHECKS = [(["--check-sync-every", "5"], 8), (["--check-sync-every", "7", "--checkpoint-every", "6"], 7)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of all jobs lie."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def jobs(folder: Path) -> Jobs:
    """What the functions below returned in a job, by their names and by rank: each job starts once."""

    def drift(name: str, options: list[str], at_the_end: bool = False) -> Callable[..., Any]:
        return partial(_drift, str(folder / name), options, at_the_end)

    functions: dict[int, dict[str, Callable[..., Any]]] = {
        2: {"late drift": drift("late drift", ["--max-steps", "4"], True)},
        3: {
            "differences": _differences,
            **{f"drift {step}": drift(f"drift {step}", options) for options, step in CHECKS},
        },
    }
    return cache(lambda n: run_all(functions[n], n, timeout=300))


def _differences() -> list[str | None]:
    """The differences found if nothing differs, then one bit, then several variables on several sides."""
    from hvd_cifar.distributed.proof import find_divergence
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import numpy as np

    variables = [
        keras.Variable(np.arange(6, dtype="float32").reshape(2, 3), name="kernel"),
        keras.Variable(np.float32(1.0), name="scale"),
        keras.Variable(np.ones(4), dtype="bfloat16", name="half"),
        keras.Variable(np.int64(7), dtype="int64", name="count"),
    ]
    found = [find_divergence(variables)]
    if world.rank == 1:
        variables[1].assign(np.nextafter(np.float32(1.0), np.float32(2.0)))
    found.append(find_divergence(variables))
    if world.rank == 2:
        variables[0].assign([[0, 1, 2], [3, 9, np.nan]])
    variables[3].assign(world.rank)
    found.append(find_divergence(variables))
    variables[0].assign(np.zeros((2, 3)) if world.rank else -np.zeros((2, 3)))  # equal numbers, other bits
    found.append(find_divergence(variables))
    return [None if f is None else f[1] for f in found]


def test_the_first_variable_that_differs_is_named_with_sides_and_amount(jobs: Jobs) -> None:
    first, *others = jobs(3)["differences"]
    assert all(other == first for other in others)
    alike, one_bit, several, zeros = first
    assert alike is None
    assert one_bit == ("scale is not the same on ranks 0, 2 as on rank 1, by 1.19209e-07")
    assert several == ("kernel is not the same on ranks 0, 1 as on rank 2, by inf; 2 variables after it also")
    assert zeros.startswith("kernel is not the same on rank 0 as on ranks 1, 2, by 0;")


def _turn_a_bit(model: Any) -> None:
    """The lowest bit of one weight, on rank 1."""
    import numpy as np

    from hvd_cifar.runtime.environment import launched_rank

    if launched_rank() == 1:
        variable = next(v for v in model.trainable_variables if v.path.endswith("dense/kernel"))
        value = np.array(variable.numpy())
        value.view(np.uint32)[11, 5] ^= 1
        variable.assign(value)


def _drift(run_dir: str, options: list[str], at_the_end: bool = False) -> dict[str, Any]:
    """`train` as a user calls it, but one bit flips after step 7, or after the last checkpoint."""
    from hvd_cifar.training.routines import Checkpointer
    from hvd_cifar.training.train import Trainer

    train, end = Trainer.train, Checkpointer.on_end

    def train_under_a_cosmic_ray(self: Trainer) -> dict[str, Any]:
        ((side, step),) = self.steps.items()

        def struck(*given: Any) -> Any:
            loss = step(*given)
            if self.run.step == 6:
                _turn_a_bit(self.run.model)
            return loss

        self.steps[side] = struck
        return train(self)

    def end_under_a_cosmic_ray(self: Checkpointer, run: Any) -> None:
        end(self, run)
        _turn_a_bit(run.model)

    ray: tuple[Any, str, Any] = (Trainer, "train", train_under_a_cosmic_ray)
    if at_the_end:
        ray = (Checkpointer, "on_end", end_under_a_cosmic_ray)
    base = ["train", "--model", SMALL_NET, "--dataset", FEW, "--run-dir", run_dir, "--eval-every", 0]
    with mock.patch.object(*ray):
        return command([*base, "--batch-size", 8, "--max-steps", 12, "--checkpoint-every", 4, *options])


def test_a_summary_says_that_ranks_ended_with_other_weights(jobs: Jobs, folder: Path) -> None:
    """They differ after the last comparison: only the summary's digests show it."""
    jobs(2)
    summary = json.loads((folder / "late drift" / "summary.json").read_text())
    assert summary["replicas_identical"] is False
    first, second = summary["weights_sha256_by_rank"]
    assert summary["weights_sha256"] == first != second


@pytest.mark.parametrize(("options", "step"), CHECKS)
def test_a_planted_drift_ends_the_run_before_anything_is_saved(
    options: list[str], step: int, jobs: Jobs, folder: Path
) -> None:
    """It is found before the checkpoint of step 8, or by the check after step 7."""
    run_dir = folder / f"drift {step}"
    first, second, third = jobs(3)[f"drift {step}"]
    assert [rank["code"] for rank in (first, second, third)] == [1, 1, 1]
    (line,) = first["errors"]
    assert f"ranks are out of sync after step {step}: " in line
    assert "dense/kernel is not the same on ranks 0, 2 as on rank 1" in line
    assert second["errors"] == third["errors"] == []
    saved = {int(p.name.removeprefix("step-")) for p in (run_dir / "checkpoints").iterdir()}
    assert saved == {4 if step == 8 else 6}
    assert not (run_dir / "summary.json").exists()
