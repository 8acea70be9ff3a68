"""An elastic job over hosts of which one loses its network, comes back, and loses a rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from benchmarks import runs
from tests.cluster.hosts import Cluster
from tests.cluster.jobs import launcher, training, variables
from tests.options import slow_until
from tests.ranks import wait_for
from tests.run_dirs import examples

STEPS = 300
OPTIONS = ["--max-steps", str(STEPS), "--precision", "float64", "--threads-per-rank", "1", "--record-examples"]


def test_a_host_is_cut_off_comes_back_and_loses_a_rank(three_hosts: Cluster, embedded: Path, tmp_path: Path) -> None:
    """Each step's loss is that of a job which is left alone, and each step has the same examples, each once."""
    first, second, third = three_hosts
    words: list[str | Path] = [*launcher(), "--elastic", "1:3", "--cool-down", "4:4"]
    words += ["--hostfile", three_hosts.hostfile(1, 1, 1), *training(embedded, three_hosts.own / "run", *OPTIONS)]
    killed = tmp_path / "killed"
    words += slow_until(killed)
    output = tmp_path / "output"
    with output.open("wb") as file:
        job = first.start(words, env=variables(first), stdout=file, stderr=file)

    def has_said(text: str, times: int = 1) -> bool:
        assert job.poll() is None, output.read_text()
        return output.read_text().count(text) >= times

    wait_for(partial(has_said, "step 20, loss"), "20 steps", 300)
    three_hosts.cut(third)
    wait_for(partial(has_said, "elastic: node3 is lost"), "the loss of node3")
    wait_for(partial(has_said, "2 ranks x 16"), "two ranks")
    wait_for(partial(has_said, "resumed from"), "the state")
    three_hosts.restore(third)
    wait_for(partial(has_said, "3 ranks go on instead of 2"), "node3 again", 200)
    wait_for(partial(has_said, "3 ranks x 10.6667", 2), "three ranks", 200)
    wait_for(lambda: second.processes("hvd_cifar train"), "the rank on node2")
    wait_for(partial(has_said, "resumed from", 2), "the state")
    for rank in second.processes("-m hvd_cifar train"):
        rank.kill()
    killed.touch()
    assert job.wait(300) == 0, output.read_text()
    said = output.read_text()
    assert "elastic: rank 1 on node2 is lost (exit code 137)" in said and "Traceback" not in said, said
    assert not any(host.processes() for host in three_hosts)
    assert [host.must("find", "/dev/shm", "-mindepth", "2") for host in three_hosts] == ["", "", ""]

    alone = first.run([*launcher(), "-np", "1", *training(embedded, three_hosts.own / "alone", *OPTIONS)], timeout=300)
    assert alone.returncode == 0, alone.stderr
    found, expected = (runs.losses(first.files / name) for name in ("run", "alone"))
    assert len(found) == STEPS and found == pytest.approx(expected, rel=1e-9)
    assert examples(first.files / "run") == examples(first.files / "alone")
