"""The newest two versions of some bytes, as files in shared memory, which outlive their writer.

A version is a file with its number as its name. The older one is overwritten under another name, so that a process that
is killed while it writes leaves the newer one whole. The launcher reads the names, so this module imports no
TensorFlow.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.errors import UserError

ROOT = Path("/dev/shm")
FREE = ("0.free", "1.free")  # names of files without a version
NONE = -1


def folder_of(job: str) -> Path:
    """The folder of an elastic job's files on each host."""
    return ROOT / job


def own_folder(job: str) -> Path:
    """The same, made where it is missing. UserError where another user has made it, or it cannot be made."""
    folder = folder_of(job)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as failure:
        raise UserError(
            f"--elastic: cannot make {folder}: {failure.strerror}: remove what is there, or make room in {ROOT}"
        ) from None
    if folder.lstat().st_uid != os.getuid():
        raise UserError(f"--elastic: {folder} is not yours: remove it")
    return folder


class TwoVersions:
    """The versions in a folder, of `size` bytes each. One process writes; any may read while it does not."""

    def __init__(self, folder: Path, size: int) -> None:
        """Make the files that are missing. UserError where shared memory has no room for them."""
        self._folder = folder
        for name in FREE[: 2 - len(versions_in(folder))]:
            try:
                with (folder / name).open("ab") as file:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as failure:
                (folder / name).unlink()
                raise UserError(
                    f"--elastic: no room for {size:,} bytes in {ROOT} ({failure.strerror}): make room, in Docker with "
                    "--shm-size, or leave --elastic out"
                ) from None

    def write(self, version: int, content: NDArray[np.uint8]) -> None:
        """Replace the older version by these bytes."""
        held = versions_in(self._folder)
        free = self._folder / FREE[not held]
        if len(held) == len(FREE):
            (self._folder / str(min(held))).rename(free)
        with free.open("r+b") as file:  # its memory is allocated
            file.write(content.data)
        free.rename(self._folder / str(version))

    def read(self, version: int) -> NDArray[np.uint8]:
        """The bytes of a version."""
        return np.fromfile(self._folder / str(version), np.uint8)


def versions_in(folder: Path) -> list[int]:
    """The versions in a folder, which may be missing."""
    with contextlib.suppress(OSError):
        return [int(name) for name in os.listdir(folder) if name.isdecimal()]
    return []
