"""Files that one process of a host makes for all, and what is said meanwhile."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from hvd_cifar.errors import UserError
from hvd_cifar.files import PART

LOCK = ".lock"
SECONDS_BETWEEN_LINES = 5.0  # of progress, and of waiting for a lock


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Onlooker:
    """Who waits for files that are made."""

    is_told: Callable[[], Any] = _ignore  # after each piece of work: no watchdog takes a long download for a hang
    is_warned: Callable[[str], Any] = _ignore  # with one line about the data that the user may not expect
    is_shown: Callable[[str], Any] = _ignore  # with a line about the progress of long work


NOBODY = Onlooker()


class Progress:
    """Shows the progress of long work in lines: what is done, its rate and the time left. pooch calls it as a bar."""

    def __init__(self, title: str, unit: str, onlooker: Onlooker, total: int = 0) -> None:
        self.title, self.unit, self.onlooker, self.total = title, unit, onlooker, total
        self.done = 0
        self._begin = self._line = time.monotonic()

    def update(self, more: int) -> None:
        """So much more is done."""
        self.done += more
        self.onlooker.is_told()
        now = time.monotonic()
        if now - self._line > SECONDS_BETWEEN_LINES and self.done:
            self._line, rate = now, self.done / (now - self._begin)
            self.onlooker.is_shown(
                f"{self.title}: {self.done:,} of {self.total:,} {self.unit}, {rate:,.0f} a second, "
                f"{max(0, self.total - self.done) / rate:,.0f} s left"
            )

    def reset(self) -> None:
        """A download has ended; another try may follow."""
        self.done = 0

    def close(self) -> None:
        """Nothing more comes."""


def have_made(
    place: Path, is_there: Callable[[Path], bool], make: Callable[[Path], Path], onlooker: Onlooker = NOBODY
) -> None:
    """Make the folder `place` unless it is there, whole or not at all. Processes may call this together: one makes it.

    `make` makes it within an empty folder, and returns where. Raises UserError as `access`, and of `make`.
    """
    if is_there(place):
        return
    with access("write", place.parent):
        place.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(place.parent / LOCK)  # the system releases it where its process dies
        while not lock.is_locked:
            try:
                lock.acquire(timeout=SECONDS_BETWEEN_LINES)
            except Timeout:
                onlooker.is_told()
                onlooker.is_shown(f"waiting for another process, which makes files in {place.parent}")
        part = place.with_name(f".{place.name}{PART}")
        try:
            if not is_there(place):  # another process may have made it while this one waited
                shutil.rmtree(part, ignore_errors=True)  # a killed process has left it
                part.mkdir()
                os.rename(make(part), place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
            lock.release()


@contextmanager
def access(verb: Literal["read", "write"], folder: Path) -> Iterator[None]:
    """Read or write files in a folder. Raises UserError where that fails (permission, no space, a long name, ...)."""
    try:
        yield
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
        remedy = "allow reading there" if verb == "read" else "free space, or allow writing there"
        remedy += ", or name another folder with --data-dir or --dataset"
        raise UserError(f"cannot {verb} {where}: {why}: {remedy}") from error


def digest_of(path: Path) -> str:
    """The SHA-256 of a file; "" where it cannot be read."""
    state = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                state.update(block)
    except OSError:
        return ""
    return state.hexdigest()
