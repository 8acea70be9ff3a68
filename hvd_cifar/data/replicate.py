"""Copies of a data set: one host reads its files in blocks, the others write and check them."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from numpy.typing import NDArray

from hvd_cifar.data.place import scratch_folder
from hvd_cifar.errors import UserError

BLOCK_BYTES = 4 << 20
RECEIVED = "received-"  # start of the names of folders that belong to this module
UNFINISHED = ".receiving"


class File(NamedTuple):
    """Length and digest of a file."""

    bytes: int
    sha256: str


class Block(NamedTuple):
    """A part of one of the files."""

    file: str
    start: int
    length: int


def blocks(files: Mapping[str, File]) -> Iterator[Block]:
    """The blocks of the whole set, file by file."""
    for name, file in files.items():
        for start in range(0, file.bytes, BLOCK_BYTES):
            yield Block(name, start, min(BLOCK_BYTES, file.bytes - start))


def describe(folder: Path, names: Sequence[str]) -> dict[str, File]:
    """Length and SHA-256 of files. Raises UserError for one that cannot be read."""
    found = {}
    for name in names:
        state, length = hashlib.sha256(), 0
        try:
            with open(folder / name, "rb") as file:
                while chunk := file.read(BLOCK_BYTES):
                    state.update(chunk)
                    length += len(chunk)
        except OSError as error:
            raise UserError(f"cannot read {folder / name}: {error.strerror}: restore it") from None
        found[name] = File(length, state.hexdigest())
    return found


class Sender:
    """Reads the blocks of a set. A failure is raised by `finish` only: until then receivers wait for every block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._failure: OSError | None = None

    def read(self, block: Block) -> NDArray[np.uint8]:
        """The bytes of a block, uint8 [length]; zeros after a failure."""
        if self._failure is None:
            try:
                with open(self._folder / block.file, "rb") as file:
                    file.seek(block.start)
                    read = np.frombuffer(file.read(block.length), np.uint8)
                if len(read) == block.length:
                    return read
                raise OSError(0, "it has become shorter", str(self._folder / block.file))
            except OSError as error:
                self._failure = error
        return np.zeros(block.length, np.uint8)

    def finish(self) -> None:
        """Raise UserError if anything could not be read."""
        if self._failure is not None:
            raise UserError(f"cannot read {self._failure.filename}: {self._failure.strerror}: restore it")


class Receiver:
    """Writes blocks into a folder in `data_dir`, which becomes the set once it is complete and checked.

    It holds no lock while blocks arrive: two jobs that wait for each other's locks would never end. A failure is raised
    by `finish` only, since the other hosts go on until then.
    """

    def __init__(self, data_dir: Path, expected: Mapping[str, File]) -> None:
        """`expected`: the files that will come; `finish` refuses a name that leaves the folder."""
        self._data_dir = data_dir
        self._expected = expected
        self._scratch: Path | None = None
        self._states = {name: hashlib.sha256() for name in expected}
        self._failure: OSError | None = None
        outside = [name for name in expected if Path(name).name != name or name in ("", "..")]
        if outside:
            self._failure = OSError(errno.EINVAL, "the name leaves the folder", outside[0])
            return
        try:
            data_dir.mkdir(parents=True, exist_ok=True)
            _clear(data_dir)
            prefix = f"{UNFINISHED}-{socket.gethostname()}-{os.getpid()}-"
            self._scratch = Path(tempfile.mkdtemp(dir=data_dir, prefix=prefix))
            self._scratch.chmod(0o755)
        except OSError as error:
            self._failure = error

    def take(self, block: Block, content: NDArray[np.uint8]) -> None:
        """Write the next block; blocks arrive in order."""
        self._states[block.file].update(content.data)
        if self._failure is None and self._scratch is not None:
            try:
                with open(self._scratch / block.file, "ab") as file:
                    file.write(content.data)
            except OSError as error:
                self._failure = error

    def finish(self, place: Path) -> None:
        """Move the set to `place`, unless another process has put it there.

        A set that was received before and is damaged is replaced; whatever else is there stays.

        Raises:
            UserError: where it could not be written, or is not what was sent.
        """
        try:
            if self._failure is not None:
                where = self._failure.filename or self._data_dir
                raise UserError(
                    f"cannot write {where}: {self._failure.strerror}: free space, allow writing there, or name another "
                    "folder with --data-dir"
                )
            wrong = [name for name, state in self._states.items() if state.hexdigest() != self._expected[name].sha256]
            if wrong:
                raise UserError(f"{wrong[0]} arrived damaged (its SHA-256 differs): start again")
            assert self._scratch is not None
            with scratch_folder(self._data_dir):
                try:
                    os.rename(self._scratch, place)  # also over an empty folder
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                    if self._is_at(place):  # another process was faster
                        return
                    if not place.name.startswith(RECEIVED):
                        raise UserError(f"{place} holds other files than those received: move it away") from None
                    shutil.rmtree(place)
                    os.rename(self._scratch, place)
        finally:
            if self._scratch is not None:
                shutil.rmtree(self._scratch, ignore_errors=True)

    def _is_at(self, place: Path) -> bool:
        try:
            return describe(place, list(self._expected)) == dict(self._expected)
        except UserError:
            return False


def _clear(data_dir: Path) -> None:
    """Remove the folders of receivers on this host that were killed."""
    of_this_host = re.compile(re.escape(f"{UNFINISHED}-{socket.gethostname()}-") + r"(\d+)-\w+")
    for left in data_dir.iterdir():
        found = of_this_host.fullmatch(left.name)
        if found and not psutil.pid_exists(int(found[1])):
            shutil.rmtree(left, ignore_errors=True)
