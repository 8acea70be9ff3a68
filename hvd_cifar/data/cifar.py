"""The binary layouts of CIFAR-10 and CIFAR-100: which files, how long, and how to read them.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the description of the binary
versions at https://www.cs.toronto.edu/~kriz/cifar.html. A record is its label bytes and 3,072 pixel bytes: all red
ones first, then green, then blue, each a 32 x 32 plane row by row. The synthetic set has CIFAR-10's layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from hvd_cifar.data.dataset import Dataset, Examples, Selected, channel_statistics, chunks
from hvd_cifar.data.place import searched
from hvd_cifar.data.records import FileImages, RecordFile
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
        train_records, test_records: number of records in each file.
        label_bytes: at the start of a record; the last of them is the label.
        classes: labels are 0 to classes - 1.
        names_file: in the folder, a class name in each line; it may be absent.
        archive: address of the archive; md5: its published checksum.
        channel_sums: of all pixels of the published training images, for each channel; (): not known.
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
    channel_sums: tuple[int, ...] = ()
    channel_mean: tuple[float, ...] | None = None
    channel_deviation: tuple[float, ...] | None = None

    @property
    def files(self) -> tuple[str, ...]:
        """The files with the examples."""
        return self.train_files + self.test_files

    @property
    def train_examples(self) -> int:
        """The number of training examples."""
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

        Raises:
            UserError: where a folder cannot be searched.
        """
        with searched(data_dir):
            for folder in (data_dir, data_dir / self.folder):
                if any((folder / name).is_file() for name in self.files):
                    return folder
        return None

    def check(self, folder: Path) -> None:
        """Raise UserError, naming the file, unless every file has its length; reads no contents."""
        for name in self.files:
            path, expected = folder / name, self.bytes_of(name)
            try:
                size = path.stat().st_size
            except OSError as error:
                raise self._damaged(
                    folder, f"cannot read {path} ({error.strerror}; {expected:,} bytes expected)"
                ) from None
            if size != expected:
                raise self._damaged(folder, f"{path} has {size:,} bytes instead of {expected:,}")

    @staticmethod
    def _damaged(folder: Path, fault: str) -> UserError:
        return UserError(f"{fault}: restore it, or move {folder} away to have the set made again")

    def read(self, folder: Path) -> Dataset:
        """Open the files, and read their labels.

        Raises:
            UserError: where a file is missing, unreadable, too short or too long, or has a wrong label; it names the
                file.
        """
        self.check(folder)
        train, test = (self._read_part(folder, files) for files in (self.train_files, self.test_files))
        mean, deviation = self.channel_mean, self.channel_deviation
        if mean is None or deviation is None:
            mean, deviation = channel_statistics(train.images)
        return Dataset(self.name, train, test, self.classes, mean, deviation, self._class_names(folder))

    def _read_part(self, folder: Path, files: Sequence[str]) -> Examples:
        """A part of the set, its labels checked."""
        records = [RecordFile(folder / name, self.bytes_of(name) // self.record_bytes) for name in files]
        images = FileImages(records, (SIDE, SIDE, CHANNELS), self.label_bytes, planes=True)
        labels = np.empty(len(images), np.int32)
        for file, end in zip(records, images.ends, strict=True):
            part = slice(end - file.count, end)
            labels[part] = images.records(part)[:, self.label_bytes - 1]
            wrong = np.flatnonzero(labels[part] >= self.classes)
            if wrong.size:
                first = int(wrong[0])
                label = f"the label of record {first} is {labels[part][first]}, not 0 to {self.classes - 1}"
                raise self._damaged(folder, f"{file.path} is damaged: {label}")
        return Examples(images, labels)

    def _class_names(self, folder: Path) -> tuple[str, ...]:
        try:
            names = tuple((folder / self.names_file).read_text(encoding="utf-8", errors="replace").split())
        except OSError:
            names = ()
        return names if len(names) == self.classes else ()


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
    # 50,000 x 1,024 times the published means 125.306918046875, 122.950394140625, 113.86538318359375.
    channel_sums=(6_415_714_204, 6_295_060_180, 5_829_907_619),
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


def is_published(dataset: Dataset) -> bool | None:
    """Whether the training images are CIFAR-10's published ones, by the sums over their pixels; None: another set.

    One changed pixel changes a sum. Labels, the images' order and the test images are not checked: there are published
    MD5 checksums of archives and of the Python version's files, but not of these files.
    """
    images = dataset.train.images
    images = images.images if isinstance(images, Selected) else images
    if dataset.name != CIFAR10.name or not isinstance(images, FileImages):
        return None
    sums = sum(chunk.sum(axis=(0, 1, 2), dtype=np.int64) for chunk in chunks(images))
    return tuple(np.asarray(sums).tolist()) == CIFAR10.channel_sums
