"""The rank that ends a job in the middle of a run is named, with its exit code, which is the job's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.ranks import CHECKOUT

PROGRAM = """
import os, sys
import hvd_cifar, keras

def net(image_shape, classes):
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

class Leaves(hvd_cifar.Callback):
    def on_step(self, run):
        if run.step == 3 and run.world.rank == 1:
            {end}

if __name__ == "__main__":
    hvd_cifar.train(net, "synthetic", global_batch_size=8, max_steps=6, callbacks=[Leaves()], run_dir="run")
"""
TRAIN = ["train", "--model", "program.py:net", "--callbacks", "program.py:Leaves", "--dataset", "synthetic"]
TRAIN += ["--global-batch-size", "8", "--max-steps", "6", "--run-dir", "run"]
LINE = "hvd_cifar: rank 1 ended first, with exit code {}{}"


@pytest.mark.parametrize(
    ("end", "words", "code", "said"),
    [
        ("sys.exit(3)", ["python", "program.py"], 3, ": SystemExit: 3 (program.py, line 11)"),
        ("sys.exit(0)", TRAIN, 1, ": SystemExit: 0 (program.py, line 11)"),
        ("os._exit(0)", TRAIN, 1, ", before the job was over"),
    ],
)
def test_a_rank_that_leaves(end: str, words: list[str], code: int, said: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM.replace("{end}", end))
    done = subprocess.run(
        [CHECKOUT / "run.sh", "-np", "2", *words], cwd=tmp_path, env=os.environ, capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    told = 0 if end == "os._exit(0)" else code
    own = [line for line in done.stderr.splitlines() if "hvd_cifar" in line]  # TensorFlow has lines of its own
    assert own == [LINE.format(told, said)] and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
