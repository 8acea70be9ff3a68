"""The binary layouts of CIFAR-10 and CIFAR-100: which files, how long, and how to read them.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the description of the binary
versions at https://www.cs.toronto.edu/~kriz/cifar.html. A record is its label bytes and 3,072 pixel bytes: all red
ones first, then green, then blue, each a 32 x 32 plane row by row. The synthetic set has CIFAR-10's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.dataset import Dataset, Examples, channel_statistics
from hvd_cifar.errors import UserError

SIDE = 32  # pixels
CHANNELS = 3

Split = Literal["train", "test"]


@dataclass(frozen=True)
class Layout:
    """One of the binary layouts.

    Attributes:
        name: for `--dataset`; title: as its authors write it.
        folder: in the archive.
        train_files, test_files: in the order of the examples.
        train_records, test_records: in each file of the part.
        label_bytes: at the start of a record; the last of them is the label.
        classes: labels are 0 to classes - 1.
        names_file: in the folder, a class name in each line; it may be absent.
        archive: address of the archive; md5: its published checksum.
        channel_mean, channel_deviation: of the training images; None: computed when the set is read.
    """

    name: str
    title: str
    folder: str
    train_files: tuple[str, ...]
    test_files: tuple[str, ...]
    train_records: int
    test_records: int
    label_bytes: int
    classes: int
    names_file: str
    archive: str
    md5: str
    channel_mean: tuple[float, ...] | None = None
    channel_deviation: tuple[float, ...] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files with the examples."""
        return self.train_files + self.test_files

    @property
    def train_examples(self) -> int:
        """Number of them."""
        return len(self.train_files) * self.train_records

    @property
    def record_bytes(self) -> int:
        """Label and pixels of one example."""
        return self.label_bytes + CHANNELS * SIDE * SIDE

    def bytes_of(self, file: str) -> int:
        """The length of a file."""
        return (self.test_records if file in self.test_files else self.train_records) * self.record_bytes

    def locate(self, data_dir: Path) -> Path | None:
        """The folder with the files: `data_dir` itself or its `folder`; None if neither has any of them.

        A set that lacks some files is damaged, not absent: `check` refuses it.
        """
        for folder in (data_dir, data_dir / self.folder):
            if any((folder / name).is_file() for name in self.files):
                return folder
        return None

    def fault(self, folder: Path) -> str | None:
        """What is wrong with the first file that is missing or has a wrong length; reads no contents."""
        for name in self.files:
            path, expected = folder / name, self.bytes_of(name)
            try:
                size = path.stat().st_size
            except OSError as error:
                return f"cannot read {path} ({error.strerror}; {expected:,} bytes expected)"
            if size != expected:
                return f"{path} has {size:,} bytes instead of {expected:,}"
        return None

    def check(self, folder: Path) -> None:
        """Raise UserError, naming the file, unless every file has its length."""
        if found := self.fault(folder):
            raise UserError(f"{found}: restore it, or move {folder} away to have the set made anew")

    def read(self, folder: Path) -> Dataset:
        """Map the files into memory.

        Raises:
            UserError: where a file is missing, unreadable, too short or too long, or has a wrong label; it names the
                file.
        """
        self.check(folder)
        train, test = (self._map(folder, files) for files in (self.train_files, self.test_files))
        mean, deviation = self.channel_mean, self.channel_deviation
        if mean is None or deviation is None:
            mean, deviation = channel_statistics(train.images)
        return Dataset(self.name, train, test, self.classes, mean, deviation, self._class_names(folder))

    def _map(self, folder: Path, files: Sequence[str]) -> Examples:
        records = [self._map_file(folder / name) for name in files]
        labels = np.concatenate([rows[:, self.label_bytes - 1] for rows in records]).astype(np.int32)
        return Examples(MappedImages(records, self.label_bytes), labels)

    def _map_file(self, path: Path) -> NDArray[np.uint8]:
        """One file as uint8 [records, record_bytes], its labels checked."""
        try:
            flat: NDArray[np.uint8] = np.memmap(path, np.uint8, mode="r")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}: make it readable, or restore it") from None
        expected = self.bytes_of(path.name)
        if flat.size != expected:  # it became shorter after the check
            raise UserError(f"{path} has {flat.size:,} bytes instead of {expected:,}: restore it")
        records = flat.reshape(-1, self.record_bytes)
        labels = records[:, self.label_bytes - 1]
        wrong = np.flatnonzero(labels >= self.classes)
        if wrong.size:
            first = int(wrong[0])
            raise UserError(
                f"{path} is damaged: the label of record {first} is {labels[first]}, not 0 to {self.classes - 1}: "
                f"restore it, or move {path.parent} away to have the set made anew"
            )
        return records

    def _class_names(self, folder: Path) -> tuple[str, ...]:
        try:
            names = tuple((folder / self.names_file).read_text(encoding="utf-8", errors="replace").split())
        except OSError:
            names = ()
        return names if len(names) == self.classes else ()


class MappedImages:
    """The images of several files as one array, uint8 [n, 32, 32, 3]; indexing it reads the files.

    The files are mapped into memory, so all ranks of a host share the operating system's copy of them.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[NDArray[np.uint8]], label_bytes: int = 1) -> None:
        """`files`: records, uint8 [records, label_bytes + 3,072] each."""
        self.files = tuple(np.asarray(file) for file in files)  # indexing a np.memmap takes microseconds more
        self.ends = np.cumsum([len(file) for file in self.files])
        self.label_bytes = label_bytes

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As of an array."""
        return len(self), SIDE, SIDE, CHANNELS

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy [b, 32, 32, 3] of the images of a slice, or of indices [b] from 0 to n - 1, in their order.

        Its memory keeps the order of the files, a plane for each channel: to reorder it takes longer than to gather it.
        """
        indices = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        records = np.empty((len(indices), self.files[0].shape[1]), np.uint8)
        number = np.searchsorted(self.ends, indices, side="right")
        for i, file in enumerate(self.files):
            chosen = np.flatnonzero(number == i)
            records[chosen] = file[indices[chosen] - (self.ends[i] - len(file))]
        return records[:, self.label_bytes :].reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it, in memory."""
        return np.asarray(self[:], dtype)


CIFAR10 = Layout(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    train_files=tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
    test_files=("test_batch.bin",),
    train_records=10_000,
    test_records=10_000,
    label_bytes=1,
    classes=10,
    names_file="batches.meta.txt",
    archive="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    md5="c32a1d4ab5d03f1284b67883e8d87530",  # published on https://www.cs.toronto.edu/~kriz/cifar.html
    channel_mean=(125.3, 123.0, 113.9),
    channel_deviation=(63.0, 62.1, 66.7),
)
CIFAR100 = Layout(
    name="cifar100",
    title="CIFAR-100",
    folder="cifar-100-binary",
    train_files=("train.bin",),
    test_files=("test.bin",),
    train_records=50_000,
    test_records=10_000,
    label_bytes=2,  # the coarse label of 20, and the fine one of 100
    classes=100,
    names_file="fine_label_names.txt",
    archive="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",  # published on the same page
)
