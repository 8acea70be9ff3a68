"""The programs of examples/horovod, as their first lines say: all ranks end with the same weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import CHECKOUT, environment

FOLDER = CHECKOUT / "examples" / "horovod"
PROGRAMS = sorted(p.name for p in FOLDER.glob("*.py") if p.name not in ("same_weights.py", "elastic_fit.py"))
GLOO = pytest.param(["horovodrun", "--gloo"], marks=pytest.mark.slow)
SAYS = {
    "accumulation.py": "64 batches, an update every 4",
    "embedding.py": "loss ",
    "fit.py": "saved SGD",
    "frozen.py": "frozen: True",
    "tape.py": "loss ",
}
ONE_AFTER_THE_OTHER = """
import runpy, sys
sys.path.insert(0, sys.argv[1])
for name in ["process_set.py", *sys.argv[2:]]:  # that one names its sets when Horovod starts
    print("program", name, flush=True)
    runpy.run_path(f"{sys.argv[1]}/{name}", run_name="__main__")
"""


@pytest.mark.parametrize("launcher", [["mpirun", "-q", "--bind-to", "none"], GLOO])
def test_each_program_ends_with_the_same_weights_on_two_ranks(launcher: list[str]) -> None:
    """One start for all."""
    others = [name for name in PROGRAMS if name != "process_set.py"]
    words = [*launcher, "-np", "2", sys.executable, "-c", ONE_AFTER_THE_OTHER, str(FOLDER)]
    done = subprocess.run([*words, *others], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 ranks, same weights on all ranks: True") == len(PROGRAMS) == 7, done.stdout
    for name, said in SAYS.items():
        assert said in done.stdout, name


@pytest.mark.slow
def test_an_elastic_fit_goes_on_without_a_killed_rank(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\n")  # Horovod bars the host of a lost rank
    script.chmod(0o755)
    numbers = ["-np", "2", "--min-np", "1", "--max-np", "2"]
    words = ["horovodrun", "--gloo", *numbers, "--host-discovery-script", str(script)]
    program = [sys.executable, str(FOLDER / "elastic_fit.py"), "kill"]
    done = subprocess.run([*words, *program], env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "goes on at epoch 2 with 1 ranks" in done.stdout and "rank 0 of 1 ends after 5 epochs" in done.stdout
    assert "1 ranks, same weights on all ranks: True" in done.stdout


RESTARTED = """
import pathlib, sys
from mpi4py.MPI import COMM_WORLD as ranks
saved = pathlib.Path(sys.argv[1])
step = int(saved.read_text()) if saved.exists() else 0
ranks.Barrier()  # all have read
if ranks.rank == 0:
    saved.write_text(str(step + 1))
print(f"step {step}", flush=True)
ranks.Barrier()
sys.exit(3 if step == 0 and ranks.rank == 1 else 0)
"""


def test_a_program_restarts_from_its_own_checkpoints(tmp_path: Path) -> None:
    """Rank 1 fails in the first start."""
    (tmp_path / "program.py").write_text(RESTARTED)
    words = [str(CHECKOUT / "run.sh"), "-np", "2", "--max-restarts", "1", "python", "program.py", "saved"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and [done.stdout.count(f"step {step}") for step in range(3)] == [2, 2, 0], done
    assert "restart 1 of 1 in 1 s, from its own checkpoints" in done.stderr, done.stderr
