"""One rank's part of a job of `tests.ranks`: it calls functions, and leaves each as it found its process.

    python tests/rank.py FOLDER               # call the functions of FOLDER/calls.json, and end
    python tests/rank.py FOLDER PID           # serve: the functions of FOLDER/0/calls.json, FOLDER/1/calls.json, ...

A rank that serves ends with the process PID.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import logging
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.01
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("HOROVOD_RANK", "0")))


def main(folder: Path, served: int | None) -> None:
    """Call the functions of one job and end, or serve the process `served`."""
    sys.path[:1] = [str(CHECKOUT)]  # in the place of this file's folder, which may hold a module's name
    if served is None:
        _call(folder)
        return
    _import_tensorflow()
    from hvd_cifar.runtime.world import start

    start(1)  # before any function computes: TensorFlow keeps its threads
    # A process that trains many nets traces functions of one name as often.
    logging.getLogger("tensorflow").addFilter(lambda record: "tf.function retracing" not in record.getMessage())
    for number in itertools.count():
        job = folder / str(number)
        while not (job / "calls.json").exists():
            if not Path(f"/proc/{served}").exists():
                return
            time.sleep(POLL_SECONDS)
        with _modules_as_before():
            _call(job)


def _import_tensorflow() -> None:
    from hvd_cifar.reporting.quiet import quiet_start

    with quiet_start():  # as in a rank of `train`: it takes a quarter less time than the bare imports
        import horovod.tensorflow  # noqa: F401


def _call(folder: Path) -> None:
    """Call a job's functions in turn, and write what they return; the first error ends the process."""
    with (folder / f"rank-{RANK}.log").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    tensorflow, deterministic, calls = json.loads((folder / "calls.json").read_text())
    if tensorflow:
        _import_tensorflow()
    results = {}
    for name, module, function, args, keywords in calls:
        print(f"--- {name}", flush=True)  # the log ends with what failed
        with _process_as_before(), _deterministic() if deterministic else nullcontext():
            results[name] = getattr(_import_file(Path(module)), function)(*args, **keywords)
    part = folder / f"rank-{RANK}.part"
    part.write_text(json.dumps(results, default=plain))
    part.rename(folder / f"rank-{RANK}.json")


@contextmanager
def _process_as_before() -> Iterator[None]:
    """Put back what a function may change in its process; its random numbers are the same wherever it runs."""
    environment, folder, path = dict(os.environ), Path.cwd(), list(sys.path)
    names = {module: dict(vars(module)) for name, module in sys.modules.items() if name.startswith("hvd_cifar")}
    _seed()
    yield
    for module, before in names.items():
        vars(module).update(before)
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    os.chdir(folder)
    sys.path[:] = path
    keras = sys.modules.get("keras")
    if keras:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
        keras.backend.clear_session()
    gc.collect()  # graphs hold their tensors in cycles


@contextmanager
def _deterministic() -> Iterator[None]:
    """TensorFlow's operations give the same bits in the block; a rank that runs already could not ask for it."""
    import tensorflow as tf
    from tensorflow.python.framework.config import disable_op_determinism

    from hvd_cifar.runtime import world

    if world._running:
        world._running = world.start(), True  # put back with all variables of modules
    tf.config.experimental.enable_op_determinism()
    yield
    disable_op_determinism()


def _seed() -> None:
    """Each rank its own numbers: what should be broadcast must differ before."""
    random.seed(RANK)
    numpy, tensorflow = sys.modules.get("numpy"), sys.modules.get("tensorflow")
    if numpy:
        numpy.random.seed(RANK)
    if tensorflow:
        tensorflow.random.set_seed(RANK)


@contextmanager
def _modules_as_before() -> Iterator[None]:
    """Forget modules of a test's own folder: the next test may have others of the same name."""
    before = set(sys.modules)
    yield
    kept = [str(CHECKOUT), sys.prefix, sys.base_prefix]
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and not any(file.startswith(folder) for folder in kept):
            del sys.modules[name]


@cache
def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def plain(value: Any) -> Any:
    """What JSON cannot write: arrays and scalars of NumPy (and what turns into them), paths, sets."""
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "tolist"):
        return value.tolist()
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
