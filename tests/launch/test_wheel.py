"""Horovod's wheel in an environment that is not this project's: slow, and needs a package index."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hvd_cifar.launch.install import installer

PROGRAM = """
from mpi4py import MPI  # before TensorFlow
import horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
assert hvd.mpi_enabled() and hvd.size() == 2
print("sum", float(hvd.allreduce(tf.constant(1.0 + hvd.rank()), op=hvd.Sum)), flush=True)
"""


def test_where_the_wheel_goes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["wheel"], ["setup", "--to", "folder"]):
        assert installer.main(words) == 2
        assert capsys.readouterr().err == "hvd_cifar: --to goes with wheel: ./run.sh wheel --to FOLDER\n"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_ranks_in_another_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = installer.recorded_options(installer.read_record())
    if options.system_mpi:
        pytest.skip("the wheel is for this machine's MPI at its path")
    (tmp_path / "wheels").mkdir()
    assert installer.main(["wheel", "--to", str(tmp_path / "wheels")]) == 0
    what, command = capsys.readouterr().err.splitlines()[-2:]
    assert "tensorflow" in what and "openmpi 4.1" in what and "glibc" in what
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    subprocess.run([venv / "bin" / "python", "-I", "-m", *shlex.split(command), "mpi4py==4.1.*"], check=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "python", "program.py"]
    left_out = ("OPAL_PREFIX", "LD_LIBRARY_PATH", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    env |= {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "OPAL_PREFIX": str(venv)}
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.count("sum 3.0")) == (0, 2), done.stderr
