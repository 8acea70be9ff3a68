"""Writing a file whole or not at all, and reading JSON of any content. Standard library only."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MOST_JSON_BYTES = 1 << 24


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError, also where it is nested too deeply for Python."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        OSError: where it cannot be read.
        ValueError: where it is no JSON, or has more than `MOST_JSON_BYTES`.
    """
    with path.open("rb") as file:
        data = file.read(MOST_JSON_BYTES + 1)
    if len(data) > MOST_JSON_BYTES:
        raise ValueError(f"it has more than {MOST_JSON_BYTES:,} bytes")
    return parse_json(data)


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


def append(path: Path, content: bytes) -> None:
    """Add to the end of a file that exists, all of it or nothing.

    Raises:
        OSError: where it cannot be written, or the file is gone.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)  # a new file would hide that the old one is gone
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]  # a disk that is nearly full takes a part
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
