"""Whose code runs: the checkout's and the environment's, whatever lies in the current folder or in PYTHONPATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import CHECKOUT

RUN_SH = str(CHECKOUT / "run.sh")
OF_OTHERS = ["random", "json", "typing", "argparse", "subprocess", "contextlib", "colorsys", "runpy"]
OF_OTHERS += ["numpy", "keras", "tensorflow", "click", "pydantic", "psutil", "hvd_cifar"]
HOSTILE = "import os, sys\nopen(os.environ['EXECUTED'], 'a').write(__name__ + '\\n')\n"
NETS = """
import beside, colorsys, sys
import hvd_cifar

assert not colorsys.__file__.startswith(sys.path[-1]), colorsys.__file__

def build(image_shape, classes):
    return beside.net(image_shape, classes)
"""
BESIDE = """
import keras
import hvd_cifar

def net(image_shape, classes):
    return keras.Sequential([keras.Input(image_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])

class Says(hvd_cifar.Callback):
    def on_end(self, run):
        print("beside was found", flush=True)
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules that must not run; each of them would leave its name in the file `executed`."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in OF_OTHERS:
        (folder / f"{name}.py").write_text(HOSTILE)
    return folder


def _run(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env |= {"EXECUTED": str(folder.parent / "executed"), **variables}
    return subprocess.run([RUN_SH, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def _executed(folder: Path) -> str:
    file = folder.parent / "executed"
    return file.read_text() if file.exists() else ""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["report", "."], 2),
        (["train", "--help"], 0),
        (["setup"], 0),
        (["-np", "2", "--validation-ranks", "1", "--dry-run", "train"], 0),
    ],
)
def test_no_module_of_the_current_folder_is_run(words: list[str], code: int, hostile: Path) -> None:
    """Nor where PYTHONPATH has an empty entry, which stands for the current folder, nor with a PYTHONHOME."""
    done = _run(hostile, *words, PYTHONPATH=":/proc/none", PYTHONHOME="/proc/none")
    assert (done.returncode, _executed(hostile)) == (code, ""), done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_import_a_user_s_modules_after_all_others(embedded: Path, hostile: Path) -> None:
    """Those beside a FILE.py, those of a MODULE in the current folder, and those of PYTHONPATH."""
    (hostile / "nets.py").write_text(NETS)
    (hostile / "beside.py").write_text(BESIDE)
    own = ["--model", "nets.py:build", "--callbacks", "beside:Says", "--dataset", "synthetic", "--run-dir", "run"]
    short = ["--data-dir", str(embedded), "--max-steps", "1", "--batch-size", "4", "--eval-every", "0"]
    done = _run(hostile, "-np", "2", "train", *own, *short, PYTHONPATH=str(hostile))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("beside was found") == 2 and _executed(hostile) == ""


def test_python_m_forgets_the_current_folder_as_soon_as_it_can(tmp_path: Path) -> None:
    """`python -m hvd_cifar`, as horovodrun and mpirun start it; Python itself has imported only little by then."""
    for name in ("random", "json", "numpy", "click", "pydantic"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    env = {**os.environ, "EXECUTED": str(tmp_path / "executed"), "PYTHONPATH": str(tmp_path)}
    words = [sys.executable, "-m", "hvd_cifar", "report", "."]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not (tmp_path / "executed").exists(), done.stderr


def test_a_program_of_the_user_s_own_imports_as_python_does(tmp_path: Path) -> None:
    """From its folder, and from PYTHONPATH, whose modules may hide the environment's."""
    (tmp_path / "program.py").write_text("import mine, numpy\nprint(mine.VALUE, numpy.VALUE)\n")
    (tmp_path / "mine.py").write_text("VALUE = 1\n")
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "numpy.py").write_text("VALUE = 2\n")
    words = ["-np", "1", "python", "program.py"]
    done = _run(tmp_path, *words, PYTHONPATH=str(tmp_path / "more"), PYTHONHOME="/proc/none")
    assert (done.returncode, done.stdout) == (0, "1 2\n"), done.stderr
