"""On a real Slurm: who is which rank under srun; a job that is preempted, starts again and ends as if not."""

from __future__ import annotations

import json
import re
import shlex
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import runs
from tests.cluster import jobs
from tests.launch.slurm import Slurm, reason_to_skip, slurm
from tests.options import SMALL_NET
from tests.ranks import CHECKOUT, wait_for

BATCH = CHECKOUT / "deploy" / "slurm.sbatch"
# What a rank knows of itself, in one write: launchers mix the pieces of several ranks' lines.
WHO = """
import json, sys
from hvd_cifar.reporting.quiet import quiet_start
with quiet_start():
    from hvd_cifar.runtime import world
me = world.start()
sys.stdout.write(f"RANK {json.dumps([me.rank, me.size, me.local_rank, me.local_size, me.host])}\\n")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes of two processors each."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    with slurm(2, 2, tmp_path_factory.mktemp("site")) as made:
        yield made


def _variables(site: Slurm) -> dict[str, str]:
    """What a job gets beside Slurm's variables; the command of users lies where `launcher` says."""
    return {name: jobs.variables(site.front)[name] for name in ("PATH", "PYTHONPATH", "TF_CPP_MIN_LOG_LEVEL")}


def test_ranks_know_who_they_are(site: Slurm) -> None:
    """Three ranks on two nodes, two and one, under srun."""
    words = ["srun", "--mpi=pmix", "--nodes=2", "--ntasks=3", sys.executable, "-c", WHO]
    done = site.run(words, _variables(site))
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line.partition("RANK ")[2]) for line in done.stdout.splitlines() if "RANK " in line]
    assert sorted(found) == [[0, 3, 0, 2, "node1"], [1, 3, 1, 2, "node1"], [2, 3, 0, 1, "node2"]]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where users hand jobs in; a stand-in where ./run.sh would first set up an environment like the one in use."""
    words = jobs.launcher()
    if words[0] == str(CHECKOUT / "run.sh"):
        return CHECKOUT
    folder = tmp_path_factory.mktemp("checkout")
    run_sh = folder / "run.sh"
    run_sh.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    run_sh.chmod(run_sh.stat().st_mode | stat.S_IXUSR)
    return folder


STEPS = 60
# In its first life a job takes half a second for a step, so that there is time to take its nodes away.
SLOW = """
import os, time
import hvd_cifar
is_slow = os.environ.get("SLURM_JOB_PARTITION") == "normal" and "SLURM_RESTART_COUNT" not in os.environ
class Slow(hvd_cifar.Callback):
    def on_step(self, run):
        time.sleep(0.5 * is_slow)
"""


@pytest.mark.timeout(1500)
def test_a_job_outlives_preemption(site: Slurm, checkout: Path, embedded: Path, tmp_path: Path) -> None:
    """A more urgent job takes the nodes after a warning; Slurm starts the job again: losses are as if not."""
    (tmp_path / "slow.py").write_text(SLOW)
    variables = _variables(site)
    variables["SLURM_EXPORT_ENV"] = "NONE"  # as sbatch --export=NONE leaves it: srun gives a step no variables

    def submit(name: str, *options: str) -> str:
        words: list[str | Path] = ["--nodes=2", "--ntasks-per-node=1", "--exclusive", f"--chdir={checkout}", *options]
        words += [f"--output={tmp_path / name}.out", BATCH]
        words += ["--model", SMALL_NET, "--dataset", "synthetic", "--data-dir", embedded, "--global-batch-size", "32"]
        words += ["--max-steps", str(STEPS), "--log-every", "1", "--checkpoint-every", "10"]
        words += ["--eval-every", "0", "--callbacks", f"{tmp_path}/slow.py:Slow"]
        return site.submit([str(word) for word in words], variables | {"RUN_DIR": str(tmp_path / name)})

    cut = submit("cut")
    site.wait_for(cut, "RUNNING")
    wait_for(lambda: 3 in runs.losses(tmp_path / "cut"), "step 3", 300)
    whole = submit("whole", "--partition=urgent")
    site.wait_for(whole, "COMPLETED")
    first = (tmp_path / "cut.out").read_text()
    slow_steps = [float(seconds) for seconds in re.findall(r"([\d.]+) s/batch", first)][1:]
    assert slow_steps and min(slow_steps) >= 0.5
    assert "stopped after step" in first and "back into the queue" in first

    found = site.wait_for(cut, "COMPLETED")
    assert found["Restarts"] == "1"
    assert (tmp_path / "cut.out").read_text().count("resumed from") == 1
    facts = jobs.recorded(tmp_path / "cut")
    assert facts["hosts"] == ["node1", "node2"]
    whole_losses = runs.losses(tmp_path / "whole")
    assert list(whole_losses) == list(range(1, STEPS + 1)) and runs.losses(tmp_path / "cut") == whole_losses
    assert not site.front.processes("hvd_cifar")
