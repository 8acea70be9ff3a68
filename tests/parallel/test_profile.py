"""The example that profiles steps: each rank's file has its operations."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.options import FEW, SMALL_NET
from tests.ranks import CHECKOUT, run_command


@pytest.mark.slow
def test_a_profile_of_two_ranks(tmp_path: Path) -> None:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    words = ["train", "--model", SMALL_NET, "--dataset", FEW, "--run-dir", tmp_path / "run", "--max-steps", 8]
    example = CHECKOUT / "examples" / "profile_steps.py"
    run_command(2, *words, "--eval-every", 0, "--callbacks", f"{example}:Profile", fresh=True)
    for rank in (0, 1):
        (path,) = (tmp_path / "run" / "tensorboard" / f"rank-{rank}").rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(path.read_bytes())
        names = {found.name for plane in space.planes for found in plane.event_metadata.values()}
        assert any("Conv2DBackpropFilter" in name for name in names)
