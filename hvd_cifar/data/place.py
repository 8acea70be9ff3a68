"""Files that one process of a host makes for all, and that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from hvd_cifar.errors import UserError

LOCK = ".lock"
SCRATCH = ".unfinished"
SECONDS_BETWEEN_LOOKS = 5.0


def _ignore() -> None:
    pass


@dataclass(frozen=True)
class Onlooker:
    """Who waits for files that are made.

    Attributes:
        sees_bar: a person, who sees a progress bar on stderr.
        is_told: called after each piece of work; a watchdog does not take a long download for a hang then.
    """

    sees_bar: bool = False
    is_told: Callable[[], Any] = _ignore


NOBODY = Onlooker()


@contextmanager
def locked(folder: Path, onlooker: Onlooker) -> Iterator[None]:
    """Hold the host's lock on a folder, which is made if it is absent.

    A process that has waited for the lock must look whether the work is already done. The system releases the lock of a
    process that dies.

    Raises:
        UserError: where the folder cannot be made or written (permission, no space left, ...), in the body also.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _acquired(folder, onlooker):
            yield
    except OSError as error:
        where = error.filename or folder
        raise UserError(
            f"cannot write {where}: {error.strerror or error}: free space, allow writing there, "
            "or name another folder with --data-dir"
        ) from error


@contextmanager
def _acquired(folder: Path, onlooker: Onlooker) -> Iterator[None]:
    lock, before = FileLock(folder / LOCK), _changed(folder)
    while not lock.is_locked:
        try:
            lock.acquire(timeout=SECONDS_BETWEEN_LOOKS)
        except Timeout:  # the lock of a dead process is free; that of a stopped one is not
            if (now := _changed(folder)) != before:
                onlooker.is_told()  # the holder has come further
            before = now
    try:
        yield
    finally:
        lock.release()


def _changed(folder: Path) -> int:
    """When any of the files that are being made in a folder was last changed."""
    made = (path for pattern in ("*.part", "*.part/*", f"{SCRATCH}/**/*") for path in folder.glob(pattern))
    newest = 0
    for path in made:
        with suppress(OSError):  # it has its name by now
            newest = max(newest, path.stat().st_mtime_ns)
    return newest


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


def check_free(place: Path, wanted: str) -> None:
    """UserError where something is in the place of a data set, without `wanted`, its first file."""
    if os.path.lexists(place) and not (place.is_dir() and not any(place.iterdir())):
        raise UserError(f"{place} is there, but has no {wanted}: move it away, or name another folder with --data-dir")


@contextmanager
def scratch_folder(data_dir: Path, onlooker: Onlooker = NOBODY) -> Iterator[Path]:
    """Hold the host's lock on `data_dir`, and give an empty folder in it, which is removed at the end.

    The caller makes files in the folder and renames it to its place. Both are on one file system, so the rename is
    atomic, and no process sees half a data set. The next process removes what a killed one has left.

    Raises:
        UserError: as `locked`.
    """
    scratch = data_dir / SCRATCH
    with locked(data_dir, onlooker):
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
