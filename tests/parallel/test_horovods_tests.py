"""Horovod 0.28.1's own tests on two ranks. `HVD_CIFAR_HOROVOD_TESTS` names the folder test/parallel of its sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import environment

NO_LR = "Keras 3's optimizers have no argument `lr`"
OF_KERAS_2 = "it derives an optimizer as Keras 2 does: Keras 3's takes a learning rate"
# Tests of what TensorFlow 2.21 or Keras 3 has no more, by file.
LEFT_OUT: dict[str, dict[str, str]] = {
    "test_tensorflow.py": {"test_horovod_syncbn_cpu": "it gives Keras's layer `fused`, which Keras 3's does not take"},
    "test_tensorflow2_keras.py": {
        "test_gradient_aggregation": OF_KERAS_2,
        "test_gradient_aggregation_with_local_vars": OF_KERAS_2,
        "test_legacy_optimizer": "Keras 3 has no keras.optimizers.legacy",
        "test_sparse_as_dense": NO_LR,
        "test_sparse_as_dense_with_grad_aggregation": NO_LR,
        "test_train_model_lr_schedule": "Keras 3 has no losses.mean_squared_error",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
def test_horovods_own_tests_pass(name: str, tmp_path: Path) -> None:
    folder = os.environ.get("HVD_CIFAR_HOROVOD_TESTS")
    if not folder:
        pytest.skip("HVD_CIFAR_HOROVOD_TESTS names no folder")
    pytest.importorskip("parameterized")
    (kind,) = re.findall(r"(?m)^class (\w+)", Path(folder, name).read_text())
    left_out = [f"--deselect={name}::{kind}::{test}" for test in LEFT_OUT[name]]
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", name]
    launcher = ["mpirun", "-q", "-np", "2", "--bind-to", "none", "--oversubscribe"]
    done = subprocess.run([*launcher, *words, *left_out], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert done.stdout.count(" passed") == 2
