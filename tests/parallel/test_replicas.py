"""Ranks that drift apart are found and named, and are stopped or resynced; equal ranks pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.options import TUTORIAL
from tests.ranks import run_ranks


def _differences() -> list[str | None]:
    """The differences found if nothing differs, then one bit, then several variables on several sides."""
    from hvd_cifar.distributed.replicas import find_divergence
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
    return [None if f is None else str(f) for f in found]


def test_the_first_variable_that_differs_is_named_with_sides_and_amount() -> None:
    first, *others = run_ranks(_differences, 3)
    assert all(other == first for other in others)
    alike, one_bit, several, zeros = first
    assert alike is None
    assert one_bit == ("scale is not the same on ranks 0, 2 as on rank 1: 1 of 1 values, by up to 1.19209e-07")
    assert several == (
        "kernel is not the same on ranks 0, 1 as on rank 2: 2 of 6 values, by up to inf; 2 variables after it also"
    )
    assert zeros.startswith("kernel is not the same on rank 0 as on ranks 1, 2: 6 of 6 values, by up to 0;")


def _turn_a_bit(model: Any) -> None:
    """The lowest bit of one weight, on rank 1."""
    import numpy as np

    from hvd_cifar.runtime.environment import launched_rank

    if launched_rank() == 1:
        variable = next(v for v in model.trainable_variables if v.path == "local3/kernel")
        value = np.array(variable.numpy())
        value.view(np.uint32)[11, 5] ^= 1
        variable.assign(value)


def _drift(data: str, run_dir: str, options: list[str], at_the_end: bool = False) -> dict[str, Any]:
    """`train` as a user calls it, but one bit flips after step 7, or after the last checkpoint."""
    from hvd_cifar import cli
    from hvd_cifar.reporting import terminal
    from hvd_cifar.training.callbacks import Checkpointer
    from hvd_cifar.training.trainer import Trainer

    train, end = Trainer.train, Checkpointer.on_end

    def train_under_a_cosmic_ray(self: Trainer) -> dict[str, Any]:
        step = self.step

        def struck(number: int, *given: Any) -> Any:
            loss = step(number, *given)
            if number == 6:
                _turn_a_bit(self.run.model)
            return loss

        self.step = struck  # type: ignore[assignment]
        return train(self)

    def end_under_a_cosmic_ray(self: Checkpointer, run: Any) -> None:
        end(self, run)
        _turn_a_bit(run.model)

    if at_the_end:
        Checkpointer.on_end = end_under_a_cosmic_ray  # type: ignore[method-assign]
    else:
        Trainer.train = train_under_a_cosmic_ray  # type: ignore[method-assign]
    said: list[str] = []
    vars(terminal)["complain"] = said.append
    cli.GRACE_SECONDS = 0.0
    base = ["train", *TUTORIAL, data, "--run-dir", run_dir, "--eval-every", "0", "--eval-examples", "100"]
    code: Any = 0
    try:
        cli.main([*base, "--batch-size", "8", "--max-steps", "12", "--checkpoint-every", "4", *options])
    except SystemExit as ended:
        code = ended.code
    return {"code": code, "said": said}


def test_a_summary_says_that_ranks_ended_with_other_weights(embedded: Path, tmp_path: Path) -> None:
    """They differ after the last comparison: only the summary's digests show it."""
    run_ranks(_drift, 2, str(embedded), str(tmp_path / "run"), ["--max-steps", "4"], True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["replicas_identical"] is False
    first, second = summary["weights_sha256_by_rank"]
    assert summary["weights_sha256"] == first != second


@pytest.mark.parametrize(
    ("options", "step"), [(["--check-sync-every", "5"], 8), (["--check-sync-every", "7", "--checkpoint-every", "6"], 7)]
)
def test_a_planted_drift_ends_the_run_before_anything_is_saved(
    options: list[str], step: int, embedded: Path, tmp_path: Path
) -> None:
    """It is found before the checkpoint of step 8, or by the check after step 7."""
    first, second, third = run_ranks(_drift, 3, str(embedded), str(tmp_path / "run"), options)
    assert [rank["code"] for rank in (first, second, third)] == [1, 1, 1]
    (line,) = first["said"]
    assert f"ranks are out of sync after step {step}: local3/kernel is not the same on ranks 0, 2 as on rank 1" in line
    assert "of 884,736 values, by up to" in line
    assert second["said"] == third["said"] == []
    saved = {int(p.name.removeprefix("step-")) for p in (tmp_path / "run" / "checkpoints").iterdir()}
    assert saved == {4 if step == 8 else 6}
    assert not (tmp_path / "run" / "summary.json").exists()


def _train_with_local_statistics(run_dir: str) -> dict[str, Any]:
    from tests.parallel.test_api import _train

    return _train(run_dir, 3, sync_batch_norm=False, check_sync_every=2)


def test_local_moving_statistics_are_no_drift_before_a_checkpoint_averages_them(tmp_path: Path) -> None:
    first, second = run_ranks(_train_with_local_statistics, 2, str(tmp_path / "run"))
    assert first == second
    assert first["steps"] == 3 and first["divergences_repaired"] == 0 and first["replicas_identical"] is True


def test_ranks_with_a_planted_drift_are_resynced_from_rank_0_on_request(embedded: Path, tmp_path: Path) -> None:
    options = ["--on-divergence", "rebroadcast"]
    first, second = run_ranks(_drift, 2, str(embedded), str(tmp_path / "run"), options)
    assert first["code"] == second["code"] == 0
    (line,) = first["said"]
    assert "RANKS WERE OUT OF SYNC after step 8: local3/kernel" in line and "go on with rank 0's values" in line
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["divergences_repaired"] == 1
    assert summary["replicas_identical"] is True
    assert summary["weights_sha256_by_rank"] == [summary["weights_sha256"]] * 2
