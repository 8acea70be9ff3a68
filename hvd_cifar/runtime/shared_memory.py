"""A file in shared memory that holds the newest of several versions of some bytes, and outlives its writer.

It has two slots, written in turn: a process that is killed while it writes one leaves the other one whole. The
launcher reads step numbers from it, so this module imports no TensorFlow.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.errors import UserError

ROOT = Path("/dev/shm")
LAYOUT_BYTES = 32
LABEL_BYTES = LAYOUT_BYTES + 16  # with the numbers of the two versions
HEAD_BYTES = 4096  # slots begin on a page
NONE = -1


def folder_of(job: str) -> Path:
    """The folder of an elastic job's files on each host."""
    return ROOT / f"hvd_cifar-{os.getuid()}" / job


def own_folder(job: str) -> Path:
    """The same, made where it is missing. UserError where another user has made it, or it cannot be made."""
    path = folder_of(job)
    for folder in (path.parent, path):
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as failure:
            raise UserError(
                f"--elastic: cannot make {folder}: {failure.strerror}: remove what is there, or make room in {ROOT}"
            ) from None
        found = folder.lstat()
        if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or stat.S_IMODE(found.st_mode) & 0o077:
            raise UserError(f"--elastic: {folder} is not a folder of yours alone: remove it")
    return path


class TwoSlots:
    """Numbered versions of `size` bytes. One process writes; any may read while it does not."""

    def __init__(self, path: Path, layout: bytes, size: int) -> None:
        """Open or make the file. One of another layout, such as of other variables, is replaced.

        `layout`: 32 bytes that identify the meaning of the bytes, such as a digest of the variables' shapes. UserError
        where shared memory has no room for the file.
        """
        whole = HEAD_BYTES + 2 * size
        self._size = size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            is_same = os.pread(descriptor, LAYOUT_BYTES, 0) == layout and os.fstat(descriptor).st_size == whole
            if not is_same:
                os.ftruncate(descriptor, 0)
                # Without room a later write to mapped memory would end the process by SIGBUS.
                os.posix_fallocate(descriptor, 0, whole)
            self._map = mmap.mmap(descriptor, whole)
        except OSError as failure:
            path.unlink()
            raise UserError(
                f"--elastic: no room for {whole:,} bytes in {ROOT} ({failure.strerror}): make room, in Docker with "
                "--shm-size, or leave --elastic out"
            ) from None
        finally:
            os.close(descriptor)
        if not is_same:
            self.clear()
            self._map[:LAYOUT_BYTES] = layout

    def clear(self) -> None:
        """Drop both versions."""
        self._mark(0, NONE)
        self._mark(1, NONE)

    def write(self, version: int, pieces: list[NDArray[np.uint8]]) -> None:
        """Replace the older version by `pieces`, which make up all bytes."""
        held = self.versions
        slot = held.index(min(held))
        self._mark(slot, NONE)
        at = HEAD_BYTES + slot * self._size
        for piece in pieces:
            self._map[at : at + piece.nbytes] = piece.data
            at += piece.nbytes
        self._mark(slot, version)

    def read(self, version: int) -> NDArray[np.uint8]:
        """The bytes of a version."""
        at = HEAD_BYTES + self.versions.index(version) * self._size
        return np.frombuffer(self._map[at : at + self._size], np.uint8)

    @property
    def versions(self) -> tuple[int, int]:
        """The numbers of the two versions; -1: none."""
        return _versions(self._map[:HEAD_BYTES])

    def _mark(self, slot: int, version: int) -> None:
        struct.pack_into("<q", self._map, LAYOUT_BYTES + 8 * slot, version)


def newest_version(path: Path) -> int:
    """The newest version that a file holds; -1: none, or no such file."""
    try:
        with path.open("rb") as file:
            return newest_of(file.read(LABEL_BYTES))
    except OSError:
        return NONE


def newest_of(label: bytes) -> int:
    """The newest version by the first `LABEL_BYTES` of a file; -1: none, or fewer bytes."""
    return max(_versions(label)) if len(label) == LABEL_BYTES else NONE


def _versions(head: bytes) -> tuple[int, int]:
    one, other = struct.unpack_from("<qq", head, LAYOUT_BYTES)
    return one, other
