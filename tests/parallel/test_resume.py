"""Resuming a run: on other ranks, after a kill at any moment, with the run's own batch; and which runs are refused."""

from __future__ import annotations

import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import jobs, runs
from tests.options import FEW, OF_ANY_SIZE, PACE, SMALL_NET
from tests.ranks import CHECKOUT, environment, run_command, run_ranks
from tests.run_dirs import examples, used
from tests.small import EXAMPLES

BASE = ["--model", SMALL_NET, "--dataset", FEW]
# 263 examples in batches of 24 are 11 steps an epoch, the last one of 23: steps 5 and 15 are in the middle of one.
COURSE = ["--global-batch-size", 24, "--precision", "float64", "--checkpoint-every", 5, "--record-examples"]
QUIET = ["--log-every", 1, "--eval-every", 0]
STEPS, PER_EPOCH = 44, 11


def _train(n: int, run_dir: Path, *options: Any) -> str:
    """What rank 0 says in a run to its end."""
    return "\n".join(run_command(n, "train", *BASE, "--run-dir", run_dir, *QUIET, *options)[0]["said"])


def _start(n: int, run_dir: Path, *options: Any) -> subprocess.Popen[bytes]:
    """A run of processes of its own, at most 50 steps a second."""
    words = jobs.command(n, *BASE, "--run-dir", run_dir, *QUIET, *options, "--callbacks", PACE)
    return subprocess.Popen(
        words, env=environment(), cwd=CHECKOUT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def test_killed_at_random_and_resumed_on_other_ranks(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    _train(1, whole, *COURSE, "--max-steps", STEPS)
    seed = random.randrange(2**32)
    print("seed", seed)  # shown where the test fails
    chance = random.Random(seed)
    kills = []
    # The second kill comes after a checkpoint, at step 5, from which the last job resumes.
    for n, least in ((2, 2), (1, 8)):
        job = _start(n, cut, *COURSE, "--max-steps", STEPS)
        began, last = time.monotonic(), max(runs.losses(cut), default=0)
        target = last + chance.randint(least, least + 7)
        while max(runs.losses(cut), default=0) < target and job.poll() is None and time.monotonic() < began + 120:
            time.sleep(chance.random() * 0.05)
        assert job.poll() is None, f"it ended by itself before step {target}"
        jobs.kill(job)
        kills.append((n, target, max(runs.losses(cut), default=0)))
    print(kills)
    assert "resumed from" in _train(3, cut, *COURSE, "--max-steps", STEPS)

    losses = runs.losses(cut)
    assert runs.steps(cut) == list(range(1, STEPS + 1))  # each step once, and in order
    assert losses == pytest.approx(runs.losses(whole), rel=1e-12)
    record = examples(whole)
    assert len(record) == STEPS and examples(cut) == record
    for first in range(1, STEPS, PER_EPOCH):
        assert used(record, first, first + PER_EPOCH - 1) == list(range(EXAMPLES)), first
    assert runs.summary(cut)["test_accuracy"] == runs.summary(whole)["test_accuracy"]


def test_the_batch_of_a_run_stays_on_other_ranks(tmp_path: Path) -> None:
    """Two ranks with the defaults make a batch of 256 and twice the learning rate; one rank goes on with these."""
    run_dir = tmp_path / "run"
    assert "global batch 256" in _train(2, run_dir, "--precision", "float64", "--max-steps", 1)
    said = _train(1, run_dir, "--max-steps", 2)  # the precision also stays that of the run
    assert "global batch 256 = 1 ranks x 256" in said and "parameters, float64)" in said

    # A run's config.json repeats it, on any number of ranks, in a run directory of its own.
    config = json.loads((run_dir / "config.json").read_text())
    assert {"seed", "model", "dataset", "global_batch_size"} <= set(config)
    facts = {"world_size", "hosts", "convolutions", "command", "hvd_cifar", "git_commit", "versions"}
    assert facts <= set(config["run"])
    repeated = tmp_path / "repeated"
    run_command(1, "train", "--config", run_dir / "config.json", "--run-dir", repeated)
    assert runs.losses(repeated) == pytest.approx(runs.losses(run_dir), rel=1e-12)
    assert len(runs.losses(repeated)) == 2


PLAIN: dict[str, Any] = {"test_time_augmentation": False}


def _in_two_sizes(whole: str, cut: str) -> list[dict[str, Any]]:
    """Train in one part and in two; results of evaluations in six views and in one."""
    import hvd_cifar

    # Synchronised: otherwise each checkpoint averages the ranks' moving statistics, which rounds.
    course: dict[str, Any] = {"global_batch_size": 24, "sync_batch_norm": True, "check_sync_every": 2}
    course |= {"log_every": 1, "eval_every": 0}
    for run_dir, steps, numbers in ((whole, 10, {}), (cut, 6, PLAIN), (cut, 10, PLAIN)):
        hvd_cifar.train(OF_ANY_SIZE, FEW, run_dir=run_dir, max_steps=steps, set=numbers, **course)
    return [hvd_cifar.evaluate(whole, **more) for more in ({}, PLAIN)]


def test_two_sizes_of_image_go_on_exactly_and_are_evaluated_in_six_views(tmp_path: Path) -> None:
    """Slow weights are mixed in after steps 5 and 10; images grow after 6, where the run is cut."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    found, other_rank = run_ranks(_in_two_sizes, 2, str(whole), str(cut))
    assert found == other_rank
    one, other = runs.summary(whole), runs.summary(cut)
    assert one["replicas_identical"] and one["weights_sha256"] == other["weights_sha256"]
    assert runs.losses(whole) == runs.losses(cut) and len(runs.losses(cut)) == 10
    assert one["precision"] == json.loads((cut / "config.json").read_text())["precision"] == "float32"

    assert one["test_views"] == 6 and 0 < one["test_accuracy_of_one_view"] < 1
    assert [result["test_views"] for result in found] == [6, 1]
    assert found[0]["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
    assert found[0]["test_loss"] != pytest.approx(found[1]["test_loss"], rel=1e-6)
    assert found[1]["test_accuracy"] == found[0]["test_accuracy_of_one_view"]
