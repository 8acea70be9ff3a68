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
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
