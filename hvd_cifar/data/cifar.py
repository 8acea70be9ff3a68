"""CIFAR-10's binary layout: which files, how long, and how to read them.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the binary version's
description at https://www.cs.toronto.edu/~kriz/cifar.html. A record is one label byte and 3,072 pixel bytes, all
red ones first, then green, then blue, each a 32 x 32 plane row by row. The synthetic set has the same layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.errors import UserError

CLASSES = 10
SIDE = 32  # pixels
CHANNELS = 3
RECORD_BYTES = 1 + CHANNELS * SIDE * SIDE
RECORDS_PER_FILE = 10_000
FILE_BYTES = RECORDS_PER_FILE * RECORD_BYTES

FOLDER = "cifar-10-batches-bin"
TRAIN_FILES = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST_FILES = ("test_batch.bin",)
FILES = TRAIN_FILES + TEST_FILES

Split = Literal["train", "test"]


class MappedImages:
    """The images of several files as one array, uint8 [n, 32, 32, 3], which is read from them when it is indexed.

    The files are mapped into memory: all ranks of a host share one copy, the operating system's.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[NDArray[np.uint8]]) -> None:
        """`files`: records, uint8 [RECORDS_PER_FILE, RECORD_BYTES] each."""
        self.files = tuple(np.asarray(file) for file in files)  # indexing a np.memmap takes microseconds more

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As of an array."""
        return len(self), SIDE, SIDE, CHANNELS

    def __len__(self) -> int:
        return len(self.files) * RECORDS_PER_FILE

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The images of a slice, or of indices [b] from 0 to n - 1, in their order: a copy, [b, 32, 32, 3].

        In memory it has the order of the files, a plane for each channel: turning it costs more than gathering it.
        """
        indices = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        records = np.empty((len(indices), RECORD_BYTES), np.uint8)
        number, row = np.divmod(indices, RECORDS_PER_FILE)
        for i, file in enumerate(self.files):
            chosen = np.flatnonzero(number == i)
            records[chosen] = file[row[chosen]]
        return records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it, in memory."""
        return np.asarray(self[:], dtype)


class Examples(NamedTuple):
    """Examples by index.

    images: uint8 [n, 32, 32, 3], height, width, and channels in the order red, green, blue.
    labels: int32 [n], 0 to 9.
    """

    images: NDArray[np.uint8] | MappedImages
    labels: NDArray[np.int32]


def locate(data_dir: Path) -> Path | None:
    """The folder with the binary files: `data_dir` itself or its `cifar-10-batches-bin`; None if neither has any.

    One file is enough: a set that has lost a file is damaged, and `check` says so; it is not absent.
    """
    for folder in (data_dir, data_dir / FOLDER):
        if any((folder / name).is_file() for name in FILES):
            return folder
    return None


def fault(folder: Path, files: Sequence[str] = FILES) -> str | None:
    """What is wrong with the first of the files that is not there or has not 30,730,000 bytes; reads no contents."""
    for path in (folder / name for name in files):
        try:
            size = path.stat().st_size
        except OSError as error:
            return f"cannot read {path} ({error.strerror}; {FILE_BYTES:,} bytes expected)"
        if size != FILE_BYTES:
            return f"{path} has {size:,} bytes instead of {FILE_BYTES:,}"
    return None


def check(folder: Path, files: Sequence[str] = FILES) -> None:
    """Raise UserError, naming the file, unless every one of the files has its length."""
    if found := fault(folder, files):
        raise UserError(f"{found}: restore it, or move {folder} away to have the set made anew")


def read(folder: Path, split: Split) -> Examples:
    """Map a split: "train" is 50,000 examples, "test" 10,000, in the order of the files.

    Raises UserError, naming the file, if one is missing, unreadable, too short or too long, or if a label is not 0
    to 9.
    """
    files = TRAIN_FILES if split == "train" else TEST_FILES
    check(folder, files)
    records = [_map_records(folder / name) for name in files]
    labels = np.concatenate([rows[:, 0] for rows in records]).astype(np.int32)
    return Examples(MappedImages(records), labels)


def _map_records(path: Path) -> NDArray[np.uint8]:
    """One file as uint8 [10,000, 3,073], its labels checked."""
    try:
        records: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: make it readable, or restore it") from None
    if records.size != FILE_BYTES:  # it was cut between the check and now
        raise UserError(f"{path} has {records.size:,} bytes instead of {FILE_BYTES:,}: restore it")
    records = records.reshape(RECORDS_PER_FILE, RECORD_BYTES)
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if wrong.size:
        first = int(wrong[0])
        raise UserError(
            f"{path} is damaged: the label of record {first} is {records[first, 0]}, not 0 to {CLASSES - 1}: "
            f"restore it, or move {path.parent} away to have the set made anew"
        )
    return records
