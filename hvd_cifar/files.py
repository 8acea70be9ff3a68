"""Writing a file whole or not at all. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a text file in one step; see `replace_bytes`."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file in one step: after a crash or on a full disk the file holds the old content or the new one.

    The content reaches the disk before the name does, and the name before this returns: a machine that loses power
    leaves no empty file.

    Raises:
        OSError: where it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, have reached the disk.

    Raises:
        OSError: where they cannot.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_text(path: Path, text: str) -> None:
    """Add text to the end of a file that exists, all of it or nothing.

    Raises:
        OSError: where it cannot be written, or the file is gone.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)  # a new file would hide that the old one is gone
    try:
        size, left = os.fstat(descriptor).st_size, text.encode()
        try:
            while left:
                left = left[os.write(descriptor, left) :]  # a disk that is nearly full takes a part
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
