"""Files that one process of a host makes for all, and that appear complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from hvd_cifar.errors import UserError

LOCK = ".lock"
SCRATCH = ".unfinished"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the host's lock on a folder, which is made if it is absent.

    A process that has waited for the lock must look whether the work is already done. The system releases the lock of a
    process that dies.

    Raises:
        UserError: where the folder cannot be made or written (permission, no space left, ...), in the body also.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / LOCK):
            yield
    except OSError as error:
        where = error.filename or folder
        raise UserError(
            f"cannot write {where}: {error.strerror or error}: free space, allow writing there, "
            "or name another folder with --data-dir"
        ) from error


@contextmanager
def scratch_folder(data_dir: Path) -> Iterator[Path]:
    """Hold the host's lock on `data_dir`, and give an empty folder in it, which is removed at the end.

    The caller makes files in the folder and renames it to its place. Both are on one file system, so the rename is
    atomic, and no process sees half a data set. The next process removes what a killed one has left.

    Raises:
        UserError: as `locked`.
    """
    scratch = data_dir / SCRATCH
    with locked(data_dir):
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
