"""Files that one process of a host makes for all, and that appear complete or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO, cast

from filelock import FileLock, Timeout

from hvd_cifar.errors import UserError
from hvd_cifar.files import LastingStream

LOCK = ".lock"
SCRATCH = ".unfinished"
SECONDS_BETWEEN_LOOKS = 5.0
SECONDS_BETWEEN_LINES = 20.0  # of progress


def _ignore(*_: Any) -> None:
    pass


@dataclass(frozen=True)
class Onlooker:
    """Who waits for files that are made.

    Attributes:
        sees_bar: a person, who sees a progress bar on stderr.
        is_told: called after each piece of work; a watchdog does not take a long download for a hang then.
        is_warned: called with one line about the data that the user may not expect.
    """

    sees_bar: bool = False
    is_told: Callable[[], Any] = _ignore
    is_warned: Callable[[str], Any] = _ignore

    @contextmanager
    def progress(self, title: str, unit: str, *columns: Any) -> Iterator[Callable[[int, int], None]]:
        """A function show(done, total), to be called after each piece of work; where no bar is seen, lines tell it."""
        # Here, since the peers of the benchmarks read the data where there is no rich.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        # Under a launcher stderr is a pipe, which rich does not take for a terminal.
        console = Console(file=cast(TextIO, LastingStream(sys.stderr)), force_terminal=True)
        name = TextColumn("{task.description}", markup=False)
        columns = columns or (MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        bar = Progress(name, BarColumn(), *columns, TimeRemainingColumn(), console=console, disable=not self.sees_bar)
        begin = line = time.monotonic()
        before = 0  # what another process had made, and the first piece of work
        with bar:
            task = bar.add_task(title, total=None, speed="")

            def show(done: int, total: int) -> None:
                nonlocal begin, before, line
                now = time.monotonic()
                if not before:
                    before, begin = done, now
                rate = (done - before) / max(1e-9, now - begin)
                bar.update(task, completed=done, total=total, speed=f"{rate:,.0f} {unit}/s")
                if not self.sees_bar and rate and now - line > SECONDS_BETWEEN_LINES:
                    line, left = now, (total - done) / rate
                    self.is_warned(
                        f"hvd_cifar: {title}: {done:,} of {total:,} {unit}, {rate:,.0f} a second, {left:,.0f} s left"
                    )
                self.is_told()

            yield show


NOBODY = Onlooker()


@contextmanager
def locked(folder: Path, onlooker: Onlooker = NOBODY) -> Iterator[Onlooker]:
    """Hold the host's lock on a folder, which is made if it is absent.

    A process that has waited for the lock must look whether the work is already done. The system releases the lock of a
    process that dies. The body tells its progress to the onlooker that it is given: processes that wait for the lock
    then know that its holder works.

    Raises:
        UserError: as `written`.
    """

    def tell() -> None:
        os.utime(folder)
        onlooker.is_told()

    with written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = _acquired(folder, onlooker)
        try:
            yield replace(onlooker, is_told=tell)
        finally:
            lock.release()


def _acquired(folder: Path, onlooker: Onlooker) -> FileLock:
    lock, seen = FileLock(folder / LOCK), folder.stat().st_mtime_ns
    while True:
        try:
            lock.acquire(timeout=SECONDS_BETWEEN_LOOKS)
            return lock
        except Timeout:  # the lock of a dead process is free; that of a stopped one is not
            if (touched := folder.stat().st_mtime_ns) != seen:
                onlooker.is_told()
            seen = touched


@contextmanager
def searched(folder: Path) -> Iterator[None]:
    """Look for files in a folder. Raises UserError where one cannot be read (permission, too long a name, ...)."""
    with _told("read", folder, "allow reading there, or name another folder with --data-dir or --dataset"):
        yield


@contextmanager
def written(folder: Path) -> Iterator[None]:
    """Write files in a folder. Raises UserError where one cannot be made or written (permission, no space, ...)."""
    with _told("write", folder, "free space, allow writing there, or name another folder with --data-dir"):
        yield


@contextmanager
def _told(verb: str, folder: Path, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        where, why = error.filename or folder, error.strerror or error
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


def is_free(place: Path) -> bool:
    """Whether nothing is there, or an empty folder, whose place `os.rename` takes."""
    return not place.is_symlink() and (not place.exists() or (place.is_dir() and not any(place.iterdir())))


@contextmanager
def scratch_folder(data_dir: Path, onlooker: Onlooker) -> Iterator[tuple[Path, Onlooker]]:
    """Hold the host's lock on `data_dir`, and give an empty folder in it, which is removed at the end.

    The caller makes files in the folder and renames it to its place. Both are on one file system, so the rename is
    atomic, and no process sees half a data set. The next process removes what a killed one has left.

    Raises:
        UserError: as `locked`.
    """
    scratch = data_dir / SCRATCH
    with locked(data_dir, onlooker) as told:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch, told
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
