"""Ranks of Horovod's side in the comparison of elastic jobs train as one rank does."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks import jobs, runs
from benchmarks.peers import elastic

pytestmark = pytest.mark.slow


def test_ranks_of_horovods_side_train_as_one_rank_does(tmp_path: Path) -> None:
    """Shards of different sizes: the mean of their means is not that of the batch."""
    data = os.environ.get("HVD_CIFAR_TEST_DATA")
    if not data:
        pytest.skip("needs CIFAR-10 in HVD_CIFAR_TEST_DATA")
    losses = []
    for ranks in (1, 2):
        work = elastic.Work(ranks, 33, 6, 2, Path(data), Path(sys.executable), tmp_path / str(ranks))
        work.folder.mkdir()
        jobs.run([str(word) for word in elastic.horovod(work)], work.folder / "log")
        losses.append(runs.losses(work.run_dir))
        assert [len(of_step) for of_step in elastic.used_examples(work.run_dir).values()] == [33] * 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len({*losses[0].values()}) == 6
