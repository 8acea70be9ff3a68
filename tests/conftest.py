"""What all tests share: Keras's types put back, the embedded data set, and where real CIFAR-10 lies, if it does."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests import ranks

settings.register_profile("shared machine", deadline=None)  # a slow example is no fault of the code
settings.load_profile("shared machine")

FOLDER = "cifar-10-batches-bin"
NOT_EVERYWHERE = {"pods", "real_data", "site"}  # fixtures: hosts with an sshd, CIFAR-10, Slurm

# A shell's background jobs and their children ignore it: tests of Ctrl-C would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(trylast=True)  # after -m has left tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let files whose tests wait, for hosts and time-outs, alternate with files that compute: both cores stay busy.

    Two workers take a file each, in this order. The short files of single/ and pages/ come last.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [path for path in files if path.parent.name in ("cluster", "faults", "launch")]
    computing = [path for path in files if path.parent.name == "parallel"]
    places = {path: n / len(group) for group in (waiting, computing) for n, path in enumerate(group)}
    items[:] = [item for path in sorted(files, key=lambda path: places.get(path, 1.0)) for item in files[path]]


def pytest_itemcollected(item: pytest.Item) -> None:
    """What takes root, a scheduler or real images is slow: every machine has the same other tests."""
    if item.path.parent.name == "cluster" or NOT_EVERYWHERE & set(getattr(item, "fixturenames", ())):
        item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def _no_ranks_left() -> Iterator[None]:
    """The ranks that serve all tests end with the last one."""
    yield
    ranks.end_groups()


@pytest.fixture(autouse=True)
def _types_of_before() -> Iterator[None]:
    """A test that sets Keras's types (as training in float64 does) leaves them as they were for the next."""
    keras = sys.modules.get("keras")
    before = (keras.config.floatx(), keras.config.dtype_policy()) if keras else None
    yield
    keras = sys.modules.get("keras")
    if keras:
        real, policy = before or ("float32", "float32")
        keras.config.set_floatx(real)
        keras.config.set_dtype_policy(policy)


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with the embedded set, drawn once: do not write there."""
    from hvd_cifar.config import DataSettings, make
    from hvd_cifar.data.source import prepare

    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "embedded"  # one for all workers
    folder.mkdir(exist_ok=True)
    prepare(make(DataSettings, {"dataset": "synthetic", "data_dir": folder}))
    return folder


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The `--data-dir` with real CIFAR-10 that HVD_CIFAR_TEST_DATA names; tests that ask for it are skipped without."""
    named = os.environ.get("HVD_CIFAR_TEST_DATA")
    if not named:
        pytest.skip("needs real CIFAR-10: HVD_CIFAR_TEST_DATA names no folder")
    folder = Path(named)
    if not (folder / FOLDER).is_dir():
        pytest.fail(f"HVD_CIFAR_TEST_DATA={named} holds no {FOLDER}")
    return folder
