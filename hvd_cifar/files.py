"""Atomic writes of files, JSON that may be malformed, messages. Standard library only."""

from __future__ import annotations

import errno
import json
import os
import secrets
import select
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 24
PART = ".part"  # ends the name of a file that is being written


def parse_json(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError where it is not JSON or is nested too deeply for Python."""
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_limited(path: Path) -> bytes:
    """The content of a file. ValueError where it has more than `MOST_BYTES`, or is no regular file."""
    if os.path.exists(path) and not os.path.isfile(path):  # reading a FIFO would block for ever
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
    return data


def read_json(path: Path) -> Any:
    """The value in a JSON file. OSError where it cannot be read; ValueError where it is not JSON, or too large."""
    return parse_json(read_limited(path))


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically; see `replace_lines`."""
    replace_lines(path, [text.encode()])


def replace_bytes(path: Path, content: bytes) -> None:
    """Write a file atomically; see `replace_lines`."""
    replace_lines(path, [content])


def replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file atomically: after a crash, or on a full disk, it holds the old content or the new one.

    The content is on disk before the file gets its name, and the name is on disk before this returns. A power failure
    therefore leaves no empty file. OSError where it cannot be written, or is no regular file.
    """
    if not can_be_replaced(path):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")  # another program may write the same file
    try:
        with part.open("xb") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # it would keep a full disk full
        raise
    sync(path.parent)


def can_be_replaced(path: Path) -> bool:
    """Whether a file may be written here: nothing is there, or a regular file, and the folder is not /dev."""
    return (os.path.isfile(path) or not os.path.lexists(path)) and os.path.realpath(path.parent) != "/dev"


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk. OSError where they cannot be written."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append(path: Path, content: bytes) -> None:
    """Append to an existing file. OSError where it is gone or cannot be written; it then is as it was."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)  # no O_CREAT: a new file would hide that the old one is gone
    try:
        size = os.fstat(descriptor).st_size
        try:
            while content:
                content = content[os.write(descriptor, content) :]  # a nearly full disk may take only a part
        except OSError:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def write(descriptor: int, data: bytes) -> None:
    """Write all of `data` to an open file, or ignore that it cannot be written."""
    # A closed pipe (`| head`), a closed terminal or a full disk must not end the job, nor the launcher's reading of the
    # ranks' output: with a full pipe ranks would block.
    with suppress(OSError):
        while data:
            try:
                data = data[os.write(descriptor, data) :]
            except BlockingIOError:  # another program has made it non-blocking
                select.select([], [descriptor], [])


def complain(message: str) -> None:
    """Print a message of this program to stderr, past Python's buffer, whose lock another thread may hold.

    It is one write, so that lines of several ranks do not mix. Names that are not UTF-8 are printed as they are.
    """
    try:
        text = message.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        text = message.encode(errors="backslashreplace")
    write(2, b"hvd_cifar: " + text + b"\n")
