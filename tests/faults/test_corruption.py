"""A bit of a gradient that flips on one rank is found by --verify-every, and leaves no trace in the weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from benchmarks import runs
from tests.options import SMALL
from tests.ranks import Jobs, command, once, run_all

Flipped = dict[str, list[int]]  # computations of rank 1, by their steps

# By the number of ranks.
FLIPPED: dict[int, Flipped] = {
    2: {"10": [0], "20": [1]},  # rank 1's share is verified in step 10; in step 20 its second computation verifies
    3: {"10": [0, 1]},  # also when it is repeated: the third rank decides, and rank 1 gets the right share
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the runs of the jobs of `jobs` are."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def jobs(embedded: Path, folder: Path) -> Jobs:
    """What the trainings below returned in a job, by their names and by rank: each job starts once."""

    def train(n: int, name: str, flipped: Flipped) -> Callable[..., Any]:
        words = ["train", *SMALL, embedded, "--run-dir", folder / f"{name} {n}", "--batch-size", 16, "--deterministic"]
        words += ["--verify-every", 10, "--max-steps", 40, "--eval-every", 0, "--eval-examples", 100]
        return partial(_flip, words, flipped)

    def start(n: int, launcher: str) -> dict[str, list[Any]]:
        functions = {"sound": train(n, "sound", {}), "faulty": train(n, "faulty", FLIPPED[n])}
        if n == 2:
            functions["repeated"] = train(n, "repeated", {"10": [0, 1]})
        return run_all(functions, n, launcher=launcher, timeout=540)

    return once(start)


def _flip(words: list[Any], flipped: Flipped) -> dict[str, Any]:
    """Train; rank 1 flips a bit of the largest value of a gradient in some of its computations of some steps."""
    import numpy as np
    import tensorflow as tf

    from hvd_cifar.training.verify import Verifier

    compute, calls = Verifier._compute, Counter[int]()

    def flips(self: Verifier, *given: Any) -> Any:
        share = compute(self, *given)
        number = calls[self.step]
        calls[self.step] += 1
        if self._world.rank == 1 and number in flipped.get(str(self.step), ()):
            values = share.gradients[2].numpy()
            values.view(np.uint32).flat[np.abs(values).argmax()] ^= 1 << 22
            share.gradients[2] = tf.constant(values)
        return share

    with mock.patch.object(Verifier, "_compute", flips):
        return command(words)


def _said(ranks: list[dict[str, Any]], code: int) -> str:
    """What all ranks of a training printed; each must have ended with this exit code."""
    said = "\n".join(line for rank in ranks for line in [*rank["said"], *rank["errors"]])
    assert [rank["code"] for rank in ranks] == [code] * len(ranks), said
    return said


@pytest.mark.parametrize("n", FLIPPED)
def test_a_flipped_bit(n: int, jobs: Jobs, folder: Path) -> None:
    found, steps = jobs(n, "mpirun"), FLIPPED[n]
    assert "WRONG" not in _said(found["sound"], 0)
    said = _said(found["faulty"], 0)
    assert said.count("COMPUTED A WRONG GRADIENT") == len(steps)
    for step in steps:
        assert f" COMPUTED A WRONG GRADIENT in step {step}: " in said
    assert said.count("hvd_cifar: rank 1 on ") == len(steps)
    sound, faulty = (runs.summary(folder / f"{name} {n}")["weights_sha256"] for name in ("sound", "faulty"))
    assert sound == faulty


def test_two_ranks_that_repeat_their_results(jobs: Jobs) -> None:
    """As two unlike processors do: nobody knows who is right, and the run ends."""
    said = _said(jobs(2, "mpirun")["repeated"], 1)
    assert "compute different gradients in step 10, and each repeats its own" in said, said
