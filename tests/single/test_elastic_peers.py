"""The comparison of elastic jobs: what it counts, its faults, and that PyTorch's side goes on where it was."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.peers import elastic
from benchmarks.peers.elastic import Course, Side, Steps, Work, outages, row
from tests.single.test_peers import CHECKOUT, PEERS


def test_an_outage_belongs_to_the_fault_before_it() -> None:
    seen = [0.0, 0.5, 1.0, 8.0, 8.5, 13.5, 14.0, 14.5, 18.5, 19.0]
    assert outages(seen, [1.25, 14.75]) == [(7.0, 12.0), (4.0, 4.0)]
    assert outages(seen, [1.25, 18.75]) == [(7.0, 16.0), (0.0, 0.0)]
    assert outages(seen, []) == []


def _record(run_dir: Path, steps: list[int], more: str = "") -> None:
    lines = [json.dumps({"event": "train", **({"dataset": "cifar10"} if more else {}), "step": s}) for s in steps]
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + more)


def test_steps_made_twice_stand_twice_in_the_record_or_were_removed_from_it(tmp_path: Path) -> None:
    peer, ours = Steps(tmp_path / "peer"), Steps(tmp_path / "ours")
    for steps in (peer, ours):
        steps.look()
        assert steps.made == [] and not steps.seen
    for name in ("peer", "ours"):
        (tmp_path / name).mkdir()
    for record in ([1, 2, 3], [1, 2, 3, 2, 3], [1, 2, 3, 2, 3, 4]):
        _record(tmp_path / "peer", record)
        peer.look()
    assert peer.twice == 2 and len(peer.seen) == 3
    for record in ([1, 2, 3], [1, 2], [1, 2, 3]):
        _record(tmp_path / "ours", record, '{"event": "ranks", "step": 3}\n{"event": "train", "st')
        ours.look()
    assert ours.twice == 1 and len(ours.seen) == 2 and ours.made == [1, 2, 3]


# A launcher that starts all ranks again where one ends; ranks go on from the last multiple of 5 steps.
LAUNCHER = """
import subprocess, sys, time
word, patience = sys.argv[2], int(sys.argv[3])
while patience:
    words = [sys.executable, "-c", sys.argv[4], sys.argv[1], str(patience)]
    ranks = [subprocess.Popen([*words, str(i), word]) for i in range(2)]
    while all(rank.poll() is None for rank in ranks):
        time.sleep(0.01)
    if all(rank.wait() == 0 for rank in ranks if rank.poll() is not None):
        sys.exit([rank.wait() for rank in ranks][0])
    for rank in ranks:
        rank.kill()
        rank.wait()
    patience -= 1
    time.sleep(1.5)
sys.exit("error: no patience")
"""
RANK = """
import json, pathlib, sys, time
from benchmarks.peers.stamps import Stamps
folder, start, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder.mkdir(exist_ok=True)

def meet(step):  # no rank is ahead of the other
    (folder / f"{start} {rank} {step}").touch()
    while not (folder / f"{start} {1 - rank} {step}").exists():
        time.sleep(0.001)

made = folder / "metrics.jsonl"
lines = made.read_text().splitlines() if made.exists() else []
step = json.loads(lines[-1])["step"] // 5 * 5 if lines else 0
stamps = Stamps(None if rank else folder, goes_on=True)
meet(step)
while step < 200:
    time.sleep(0.04)
    step += 1
    meet(step)
    stamps.write(step, 0.0)
(folder / "summary.json").write_text('{"weights_sha256": "same"}')
"""


def _toy(patience: int) -> Side:
    def words(work: Work) -> list[Any]:
        return [sys.executable, "-c", LAUNCHER, work.run_dir, "toy-rank", patience, RANK]

    return Side("toy", words, "toy-rank")


def _work(folder: Path) -> Work:
    return Work(2, 2, 200, 5, folder, Path(sys.executable), folder / "toy")


def test_faults_kill_ranks_of_a_whole_job(tmp_path: Path) -> None:
    course = elastic.run(_toy(10), _work(tmp_path), 2, random.Random(1))
    assert course.told == "" and len(course.faults) == 2 and course.lost == 0
    assert all(1.5 <= first <= total for first, total in outages(course.seen, course.faults))
    assert 0 <= course.twice <= 8
    name, whole, faults, *_, lost, same, _ = row("toy", Course(digest="same"), [course])
    assert (name, whole, faults, lost, same) == ("toy", "1 of 1", "2", "0", "1 of 1")


def test_a_job_that_gives_up_has_no_numbers_but_its_own_words(tmp_path: Path) -> None:
    course = elastic.run(_toy(1), _work(tmp_path), 2, random.Random(1))
    assert course.told == "ended with code 1: error: no patience" and len(course.faults) == 1
    assert row("toy", Course(), [course])[:3] == ["toy", "0 of 1", ""]


def test_wrong_options_are_told_of_in_one_line(tmp_path: Path) -> None:
    for words, said in (
        (["--batch", "127"], "--batch 127: not a multiple of --ranks 2"),
        (["--keep", str(tmp_path)], f"--keep {tmp_path}: it exists; give another folder"),
        (["--data-dir", str(tmp_path)], "no CIFAR-10 in its binary layout is there"),
    ):
        found = CliRunner().invoke(elastic.main, words)
        assert found.exit_code == 2 and said in found.output


@pytest.mark.skipif(not (PEERS / "bin/python").exists(), reason="needs PyTorch in an environment of its own")
def test_pytorchs_side_goes_on_from_its_snapshot(tmp_path: Path) -> None:
    data = os.environ.get("HVD_CIFAR_TEST_DATA")
    if not data:
        pytest.skip("needs CIFAR-10 in HVD_CIFAR_TEST_DATA")
    words = [str(PEERS / "bin/python"), "-m", "benchmarks.peers.ddp", "--data-dir", data, "--model", "tutorial"]
    words += ["--batch-size", "32", "--log-every", "1", "--snapshot-every", "2"]
    found = {}
    for name, ends in (("whole", ["6"]), ("in parts", ["5", "6"])):
        run_dir = tmp_path / name
        for end in ends:
            own = ["--run-dir", str(run_dir), "--max-steps", end, "--store", str(tmp_path / f"store-{name}-{end}")]
            environment = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
            subprocess.run([*words, *own], cwd=CHECKOUT, env=environment, check=True, timeout=300)
        steps = Steps(run_dir)
        steps.look()
        digest = json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
        found[name] = steps.twice, digest
    assert found["whole"][0] == 0 and found["in parts"][0] == 1 and found["whole"][1] == found["in parts"][1]
