"""Every example runs as its first line says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.options import FEW, SMALL_NET
from tests.ranks import CHECKOUT, environment, run_command

pytestmark = pytest.mark.slow

EXAMPLES = CHECKOUT / "examples"


def _on_two_ranks(*words: Any, cwd: Path) -> str:
    launcher = ["mpirun", "-q", "-np", "2", "--bind-to", "none", sys.executable]
    env = environment({"PYTHONPATH": str(CHECKOUT)})
    done = subprocess.run([*launcher, *map(str, words)], capture_output=True, text=True, timeout=300, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("build", "rate"), [("build", "0.05 to 0.1 over"), ("build_with_recipe", "0.001 to 0.002")])
def test_a_net_a_data_set_and_a_callback_of_ones_own_train_together(build: str, rate: str, tmp_path: Path) -> None:
    words = ["-m", "hvd_cifar", "train", "--model", EXAMPLES / f"my_net.py:{build}"]
    words += ["--dataset", EXAMPLES / "my_data.py:load", "--callbacks", EXAMPLES / "my_callback.py:BestStep"]
    said = _on_two_ranks(*words, "--run-dir", tmp_path / "run", "--max-steps", 4, "--eval-every", 2, cwd=tmp_path)
    assert said.count("best test accuracy: ") == 1
    assert f"learning rate {rate}" in said and "start-up proof: gradients of which each rank has a part" in said


def test_keras_fit_trains_alike_on_all_ranks(tmp_path: Path) -> None:
    said = _on_two_ranks(EXAMPLES / "fit.py", cwd=tmp_path)
    assert "2 ranks, loss 0." in said and "same weights on all ranks: True" in said


def test_the_whole_idea_on_one_page_learns(tmp_path: Path) -> None:
    said = _on_two_ranks(EXAMPLES / "minimal.py", cwd=tmp_path)
    losses = [float(line.split("loss ")[1].split()[0]) for line in said.splitlines() if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < 0.8 * losses[0]


def test_a_profile_has_the_operations_of_each_rank(tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    words = ["train", "--model", SMALL_NET, "--dataset", FEW, "--run-dir", tmp_path / "run", "--max-steps", 8]
    example = EXAMPLES / "profile_steps.py"
    run_command(2, *words, "--eval-every", 0, "--callbacks", f"{example}:Profile", fresh=True)
    for rank in (0, 1):
        (path,) = (tmp_path / "run" / "tensorboard" / f"rank-{rank}").rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        names = {found.name for plane in space.planes for found in plane.event_metadata.values()}
        assert any("Conv2DBackpropFilter" in name for name in names)
