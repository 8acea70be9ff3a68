"""A bit of a gradient that flips on one rank is found by --verify-every, and leaves no trace in the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs
from tests.faults.jobs import start

# Rank 1 flips a bit of the largest value of a gradient in some of its computations of some steps.
PROGRAM = """
import numpy as np
import tensorflow as tf
import hvd_cifar
from hvd_cifar.training.verify import Verifier

compute, calls = Verifier._compute, {}

def flipped(self, micro_batches, function):
    share = compute(self, micro_batches, function)
    number = calls.setdefault(self.step, 0)
    calls[self.step] += 1
    if self._world.rank == 1 and number in FLIPPED.get(str(self.step), ()):
        values = share.gradients[2].numpy()
        values.view(np.uint32).flat[np.abs(values).argmax()] ^= 1 << 22
        share.gradients[2] = tf.constant(values)
    return share

Verifier._compute = flipped

class Nothing(hvd_cifar.Callback):
    pass
"""


def _run(data: Path, folder: Path, ranks: int, flipped: dict[int, list[int]]) -> tuple[int, str, Path]:
    folder.mkdir()
    program = folder / "flips.py"
    program.write_text(f"FLIPPED = {json.dumps(flipped)}\n{PROGRAM}")
    options: list[Any] = ["--deterministic", "--verify-every", 10, "--max-steps", 40, "--eval-every", 0]
    options += ["--callbacks", f"{program}:Nothing"] * bool(flipped)
    running = start(["-np", ranks], data, folder / "run", *options)
    try:
        return running.wait(), running.said(), folder / "run"
    finally:
        running.end()


@pytest.fixture(scope="module")
def sound(embedded: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The final weights of runs without a fault, by the number of ranks."""
    found = {}
    for ranks in (2, 3):
        code, said, run_dir = _run(embedded, tmp_path_factory.mktemp("sound") / str(ranks), ranks, {})
        assert code == 0 and "WRONG" not in said, said
        found[ranks] = runs.summary(run_dir)["weights_sha256"]
    return found


@pytest.mark.parametrize(
    ("ranks", "flipped", "steps"),
    [
        # Rank 1's share is verified in step 10. In step 20 rank 1 verifies: that is its second computation.
        (2, {10: [0], 20: [1]}, [10, 20]),
        (3, {10: [0, 1]}, [10]),  # also when it is repeated: the third rank decides, and rank 1 gets the right share
    ],
)
def test_a_flipped_bit(
    ranks: int, flipped: dict[int, list[int]], steps: list[int], sound: dict[int, str], embedded: Path, tmp_path: Path
) -> None:
    code, said, run_dir = _run(embedded, tmp_path / "faulty", ranks, flipped)
    assert code == 0, said
    assert said.count("COMPUTED A WRONG GRADIENT") == len(steps)
    for step in steps:
        assert f" COMPUTED A WRONG GRADIENT in step {step}: " in said
    assert said.count("hvd_cifar: rank 1 on ") == len(steps)
    assert runs.summary(run_dir)["weights_sha256"] == sound[ranks]


def test_two_ranks_that_repeat_their_results(embedded: Path, tmp_path: Path) -> None:
    """As two unlike processors do: nobody knows who is right, and the run ends."""
    code, said, _ = _run(embedded, tmp_path / "faulty", 2, {10: [0, 1]})
    assert code == 1 and "compute different gradients in step 10, and each repeats its own" in said, said
