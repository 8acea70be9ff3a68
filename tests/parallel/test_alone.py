"""The library `hvd_cifar.distributed` by itself: its tests pass where nothing else of the package is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import CHECKOUT

FILES = ["__init__", "conftest", "horovod_nets", "rank", "ranks"]
# What starts the ranks of tests, in the place of the package's own.
STAND_INS = {
    "__init__.py": "",
    "runtime/world.py": """
from types import SimpleNamespace
import horovod.tensorflow as hvd
def start(threads=None):
    hvd.init()
    return SimpleNamespace(rank=hvd.rank(), size=hvd.size())
""",
    "reporting/quiet.py": "from contextlib import nullcontext as quiet_start",
}


@pytest.mark.slow
def test_its_tests_pass_with_this_folder_alone(tmp_path: Path) -> None:
    """HVD_CIFAR_ALONE: other tests, such as "optimizer fit"."""
    package, names = tmp_path / "hvd_cifar", os.environ.get("HVD_CIFAR_ALONE", "batch_norm fit").split()
    shutil.copytree(CHECKOUT / "hvd_cifar" / "distributed", package / "distributed")
    for name, text in STAND_INS.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)
    (tmp_path / "tests" / "parallel").mkdir(parents=True)
    for name in FILES + [f"parallel/test_{name}" for name in names]:
        shutil.copy(CHECKOUT / "tests" / f"{name}.py", tmp_path / "tests" / f"{name}.py")
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not without_an_example", "tests"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-5000:] + done.stderr
