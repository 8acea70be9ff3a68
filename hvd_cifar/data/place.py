"""Files that one process of a host makes for all, and that appear complete or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from filelock import FileLock, Timeout

from hvd_cifar.errors import UserError

LOCK = ".lock"
SCRATCH = ".unfinished"
SECONDS_BETWEEN_SIGNS = 5.0

_watcher: ContextVar[Callable[[], None] | None] = ContextVar("watcher", default=None)


@contextmanager
def telling(watcher: Callable[[], None]) -> Iterator[None]:
    """Within this block `watcher` is called at each `sign_of_life`."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def sign_of_life() -> None:
    """A preparation of unknown length, such as a download, has come further: a watchdog sees that it does not hang."""
    if watcher := _watcher.get():
        watcher()


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
        with _acquired(FileLock(folder / LOCK)):
            yield
    except OSError as error:
        where = error.filename or folder
        raise UserError(
            f"cannot write {where}: {error.strerror or error}: free space, allow writing there, "
            "or name another folder with --data-dir"
        ) from error


@contextmanager
def _acquired(lock: FileLock) -> Iterator[None]:
    while not lock.is_locked:
        try:
            lock.acquire(timeout=SECONDS_BETWEEN_SIGNS)
        except Timeout:  # its holder downloads or decodes; the lock of a dead process is free
            sign_of_life()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def searched(folder: Path) -> Iterator[None]:
    """Look for files in a folder.

    Raises:
        UserError: where the body meets a file or folder that cannot be read (permission, too long a name, ...).
    """
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename or folder}: {error.strerror or error}: allow reading there, or name another "
            "folder with --data-dir or --dataset"
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
