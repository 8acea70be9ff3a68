"""--profile-steps: which steps, what is said where there is no profile, and the files of real ranks."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvd_cifar.config import TrainSettings, make
from hvd_cifar.errors import UserError
from hvd_cifar.extensions import profile
from tests.ranks import run_ranks


@pytest.mark.parametrize("given", ["110:100", "x", "0:3", "5", "-1:2", "1:2:3", "1:101", [3], ["a", 2]])
def test_wrong_windows(given: Any) -> None:
    with pytest.raises(UserError, match="^--profile-steps ") as failure:
        make(TrainSettings, {"profile_steps": given})
    assert "\n" not in str(failure.value)


def test_windows() -> None:
    for given, steps in (("100:110", (100, 110)), ([7, 7], (7, 7))):
        assert make(profile.Settings, {"profile_steps": given}).profile_steps == steps
        assert make(TrainSettings, {"profile_steps": given}).model_dump()["profile_steps"] == steps


def test_a_profile_that_is_left_out_is_told() -> None:
    told: list[tuple[str, int]] = []
    run: Any = SimpleNamespace(step=7, total_steps=109, warn=lambda line, step: told.append((line, step)))
    for profiler in (profile.Profiler((7, 9)), profile.Profiler((9, 10))):
        profiler.on_build(run)
        profiler.on_start(run)
        profiler.on_end(run)
    whys = ("7:9: no profile: the run goes on after step 7", "9:10: no profile: the run ended after step 7")
    assert told == [(f"--profile-steps {why}", 7) for why in whys]
    with pytest.raises(UserError, match="--profile-steps 100:110: the run ends after step 109"):
        profile.Profiler((100, 110)).on_build(run)


def _train(data: str, run_dir: str) -> None:
    from hvd_cifar.config import TrainSettings, make
    from hvd_cifar.training.train import train

    common = {"model": "tutorial", "dataset": "synthetic", "data_dir": data, "global_batch_size": 4, "max_steps": 4}
    common |= {"eval_every": 0, "threads_per_rank": 1, "summary_every": 0, "run_dir": run_dir}
    common |= {"set": {"warmup_epochs": 0, "learning_rate_factor": 1}}
    train(make(TrainSettings, {**common, "profile_steps": "3:4"}))


@pytest.mark.slow
def test_a_profile_of_two_ranks(embedded: Path, tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    run_ranks(_train, 2, str(embedded), str(tmp_path / "run"))
    files = sorted((tmp_path / "run/tensorboard/plugins/profile/steps-3-4").iterdir())
    assert [path.name[:7] for path in files] == ["rank-0-", "rank-1-"]
    for path in files:
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        names = {found.name for plane in space.planes for found in plane.event_metadata.values()}
        assert any("HorovodAllreduce" in name for name in names) and any("Conv2DBackprop" in name for name in names)
