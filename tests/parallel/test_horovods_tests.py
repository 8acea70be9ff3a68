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
FUSED = "it gives Keras's layer `fused`, which Keras 3's does not take"
OF_NUMPY_1 = "it compares a half with 1e-8, which is 0 in NumPy 2's half precision"
# Tests of what NumPy 2, TensorFlow 2.21 or Keras 3 has no more, by file.
LEFT_OUT: dict[str, dict[str, str]] = {
    "test_tensorflow.py": {"test_horovod_syncbn_cpu": FUSED},
    "test_tensorflow_process_sets.py": {"test_horovod_reducescatter_grad_cpu_process_sets": OF_NUMPY_1},
    "test_tensorflow2_keras.py": {
        "test_gradient_aggregation": OF_KERAS_2,
        "test_gradient_aggregation_with_local_vars": OF_KERAS_2,
        "test_legacy_optimizer": "Keras 3 has no keras.optimizers.legacy",
        "test_sparse_as_dense": NO_LR,
        "test_sparse_as_dense_with_grad_aggregation": NO_LR,
        "test_train_model_lr_schedule": "Keras 3 has no losses.mean_squared_error",
    },
    "test_tensorflow2_keras_process_sets.py": {"test_process_set_optimizer": OF_KERAS_2},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LEFT_OUT)
@pytest.mark.parametrize("keras", ["keras", "tf_keras"])
def test_horovods_own_tests_pass(keras: str, name: str, tmp_path: Path) -> None:
    """Under Keras 3, and all of them with the legacy package of Keras 2."""
    folder = os.environ.get("HVD_CIFAR_HOROVOD_TESTS")
    if not folder:
        pytest.skip("HVD_CIFAR_HOROVOD_TESTS names no folder")
    for package in ("parameterized", "mock", keras):
        pytest.importorskip(package)
    (kind,) = re.findall(r"(?m)^class (\w+)", Path(folder, name).read_text())
    listed = [test for test, why in LEFT_OUT[name].items() if keras == "keras" or why == OF_NUMPY_1]
    left_out = [f"--deselect={name}::{kind}::{test}" for test in listed]
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-o", "addopts=", name]
    launcher = ["mpirun", "-q", "-np", "2", "--bind-to", "none", "--oversubscribe"]
    env = environment() | ({"TF_USE_LEGACY_KERAS": "1"} if keras == "tf_keras" else {})
    done = subprocess.run([*launcher, *words, *left_out], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:]
    assert len(re.findall("(?: passed| deselected).* in ", done.stdout)) == 2  # of one file all tests are left out
