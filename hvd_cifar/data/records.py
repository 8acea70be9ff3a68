"""Images in files of records, read by index. Every rank of a host reads the operating system's one copy of a file.

Files are read, not mapped: where a mapped file becomes shorter, the system ends the process without a word (SIGBUS).
Reading takes 0.9 to 1.6 us an image longer than a mapped file does, beside 20 to 40 us for the transforms (two shared
cores of an AMD EPYC, files in the page cache, batches of 64 to 1024; medians of 200 batches, with transforms of 30).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.errors import UserError


@dataclass(frozen=True)
class RecordFile:
    """A file of `count` records."""

    path: Path
    count: int


class FileImages:
    """The images of several files as one array, uint8 [n, height, width, channels]; indexing it reads the files."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[RecordFile], size: tuple[int, int, int], label_bytes: int, planes: bool) -> None:
        """Open the files.

        Args:
            size: (height, width, channels) of every image.
            label_bytes: before the pixels of a record.
            planes: whether a record has a plane for each channel, one after the other.

        Raises:
            UserError: where a file cannot be opened.
        """
        self.files, self.size = tuple(files), size
        self.label_bytes, self.planes = label_bytes, planes
        self.record_bytes = label_bytes + int(np.prod(size))
        counts = [file.count for file in files]
        self.ends = np.cumsum(counts)  # of the files, in records
        self._begins = self.ends - counts
        try:
            self._opened = [io.FileIO(file.path) for file in files]
        except OSError as error:
            raise UserError(
                f"cannot read {error.filename}: {error.strerror}: make it readable, or restore it"
            ) from None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[n, height, width, channels]."""
        return len(self), *self.size

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy [b, height, width, channels] of the images of a slice, or of indices [b] from 0 on, in their order.

        Its memory keeps the order of the files, such as a plane for each channel: to reorder it takes longer than to
        read it.

        Raises:
            UserError: where a file has become shorter, or cannot be read.
        """
        pixels = self.records(index)[:, self.label_bytes :]
        height, width, channels = self.size
        if self.planes:
            return pixels.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        return pixels.reshape(-1, height, width, channels)

    def records(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The whole records, uint8 [b, record_bytes]; as `__getitem__`."""
        indices = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        records = np.empty((len(indices), self.record_bytes), np.uint8)
        numbers = np.searchsorted(self.ends, indices, side="right")
        within = indices - self._begins[numbers]
        for record, number, place in zip(records, numbers.tolist(), within.tolist(), strict=True):
            path = self.files[number].path
            try:
                got = os.preadv(self._opened[number].fileno(), [record.data], place * self.record_bytes)
            except OSError as error:
                raise UserError(f"cannot read {path}: {error.strerror}: restore it, and start again") from None
            if got != self.record_bytes:
                raise UserError(f"{path} has become shorter while it was read: restore it, and start again")
        return records

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it, in memory."""
        return np.asarray(self[:], dtype)
