"""Make files once per host, and put them in place whole or not at all."""

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
def scratch_folder(data_dir: Path) -> Iterator[Path]:
    """Hold the host's lock on `data_dir`, and lend an empty folder in it that is gone at the end.

    Other processes wait at the door, so whoever enters looks first whether the work is already done. What is to stay
    is made in the lent folder and then renamed to its place: both are on one file system, so the rename is atomic,
    and nobody ever sees half a data set. What a killed process left behind is cleared by the next one that enters.
    The system drops the lock of a process that dies.

    Raises UserError if the folder cannot be made or written (permission, no space left, ...), in the body too.
    """
    scratch = data_dir / SCRATCH
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(data_dir / LOCK):
            if scratch.exists():
                shutil.rmtree(scratch)
            scratch.mkdir()
            try:
                yield scratch
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        where = error.filename or data_dir
        raise UserError(
            f"cannot write {where}: {error.strerror or error}: free space, allow writing there, "
            "or name another folder with --data-dir"
        ) from error
