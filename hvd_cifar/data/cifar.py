"""CIFAR-10 and CIFAR-100 in their binary layouts: which files, how they come onto a host, and how to read them.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images" (2009), and the description of the binary
versions at https://www.cs.toronto.edu/~kriz/cifar.html. A record is its label bytes and 3,072 pixel bytes: all red
ones first, then green, then blue, each a 32 x 32 plane row by row. The synthetic set has CIFAR-10's layout.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hvd_cifar.data.dataset import Dataset, Examples, FileImages, channel_statistics
from hvd_cifar.data.host_files import NOBODY, Onlooker, Progress, access, have_made
from hvd_cifar.errors import UserError

SIDE = 32  # pixels
CHANNELS = 3
CHUNK_BYTES = 1 << 16  # of a download
TIMEOUT = (10.0, 60.0)  # seconds: to connect, and without a new byte


@dataclass(frozen=True)
class Layout:
    """One of the binary layouts, a `source.Source`."""

    name: str  # for `--dataset`
    title: str  # as its authors write it
    folder: str  # in the archive
    train: Mapping[str, int]  # records by file, in the order of the examples
    test: Mapping[str, int]
    label_bytes: int  # at the start of a record; the last of them is the label, from 0 to classes - 1
    classes: int
    names_file: str  # in the folder, a class name in each line; it may be absent
    archive: str  # its address
    md5: str  # as published
    channel_mean: tuple[float, ...] | None = None  # of the training images; None: computed when the set is read
    channel_deviation: tuple[float, ...] | None = None
    draw: Callable[[Path, Onlooker], Path] | None = None  # into a folder, which it returns; None: in the archive

    @property
    def files(self) -> tuple[str, ...]:
        """The files with the examples."""
        return (*self.train, *self.test)

    @property
    def record_bytes(self) -> int:
        """Label and pixels of one example."""
        return self.label_bytes + CHANNELS * SIDE * SIDE

    def bytes_of(self, file: str) -> int:
        """The length of a file."""
        return {**self.train, **self.test}[file] * self.record_bytes

    def locate(self, data_dir: Path, _: Onlooker = NOBODY) -> Path | None:
        """The folder with the files: `data_dir` itself or its `folder`; None if neither has any of them.

        A set that lacks some files is damaged, not absent: `check` refuses it. Only CIFAR's files may be in `data_dir`
        itself: the synthetic set's have the same names. Raises UserError where a folder cannot be searched.
        """
        with access("read", data_dir):
            for folder in (data_dir / self.folder,) if self.draw else (data_dir, data_dir / self.folder):
                if any((folder / name).is_file() for name in self.files):
                    return folder
        return None

    def prepare(self, data_dir: Path, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the files, their lengths checked; they are made where there are none.

        Raises DownloadError where the archive cannot be downloaded, UserError where the files are damaged or cannot be
        made.
        """

        def make(scratch: Path) -> Path:
            return self.draw(scratch, onlooker) if self.draw else fetch(self, scratch, onlooker)

        place = data_dir / self.folder
        have_made(place, lambda _: self.locate(data_dir) is not None, make, onlooker)
        found = self.locate(data_dir) or place
        self.check(found)
        return found

    def check(self, folder: Path) -> None:
        """Raise UserError, naming the file, unless every file has its length; reads no contents."""
        for name in self.files:
            path, expected = folder / name, self.bytes_of(name)
            try:
                size = f"{path.stat().st_size:,} bytes"
            except OSError as error:
                size = f"no length ({error.strerror})"
            if size != f"{expected:,} bytes":
                raise self._damaged(folder, f"{path} has {size} instead of {expected:,}")

    @staticmethod
    def _damaged(folder: Path, fault: str) -> UserError:
        return UserError(f"{fault}: restore it, or move {folder} away to have the set made again")

    def read(self, folder: Path) -> Dataset:
        """Open the files, and read their labels.

        Raises UserError, naming the file, where one is missing, unreadable, too short or long, or has a wrong label.
        """
        self.check(folder)
        train, test = (self._read_part(folder, files) for files in (self.train, self.test))
        mean, deviation = self.channel_mean, self.channel_deviation
        if mean is None or deviation is None:
            mean, deviation = channel_statistics(train.images)
        names: tuple[str, ...] = ()
        with suppress(OSError):
            names = tuple((folder / self.names_file).read_text(encoding="utf-8", errors="replace").split())
        names = names if len(names) == self.classes else ()
        return Dataset(self.name, train, test, self.classes, mean, deviation, names)

    def _read_part(self, folder: Path, files: Mapping[str, int]) -> Examples:
        """A part of the set, its labels checked."""
        records = {folder / name: count for name, count in files.items()}
        images = FileImages(records, (SIDE, SIDE, CHANNELS), self.label_bytes, planes=True)
        of_files = []
        for path in records:
            labels = np.fromfile(path, np.uint8).reshape(-1, self.record_bytes)[:, self.label_bytes - 1]
            wrong = np.flatnonzero(labels >= self.classes)
            if wrong.size:
                label = f"the label of record {wrong[0]} is {labels[wrong[0]]}, not 0 to {self.classes - 1}"
                raise self._damaged(folder, f"{path} is damaged: {label}")
            of_files.append(labels.astype(np.int32))
        return Examples(images, np.concatenate(of_files))


class DownloadError(UserError):
    """The archive cannot be downloaded: no network, no such host or file, a server's fault, or a time-out."""


def fetch(layout: Layout, scratch: Path, onlooker: Onlooker) -> Path:
    """Download a layout's archive into the folder `scratch`, and unpack it there; returns the folder of its files.

    Raises DownloadError where it cannot be downloaded, in three tries; UserError where it is another file than its
    authors published, or lacks files; OSError where `scratch` cannot be written.
    """
    import pooch  # here: the peers of the benchmarks read CIFAR-10 with NumPy alone

    pooch.get_logger().setLevel("ERROR")
    url, name = layout.archive, "archive.tar.gz"
    # Not compressed once more: the checksum is that of the file itself.
    headers = {"Accept-Encoding": "identity"}
    bar = Progress(f"downloading {layout.title}", "bytes", onlooker)
    get = pooch.HTTPDownloader(progressbar=bar, chunk_size=CHUNK_BYTES, timeout=TIMEOUT, headers=headers)
    source = pooch.create(scratch, "", registry={name: f"md5:{layout.md5}"}, urls={name: url}, retry_if_failed=2)
    try:
        archive = source.fetch(name, downloader=get)
    except (OSError, ValueError, TypeError) as error:  # the last two: a malformed proxy, or a redirect
        if getattr(error, "errno", None):
            raise  # the disk's: requests' own errors are OSErrors without a number
        if "hash of downloaded file" in str(error):  # pooch's, which names both checksums
            raise UserError(
                f"the file from {url} is not the archive of {layout.title} ({str(error).partition('. ')[0]}): try again"
            ) from error
        raise DownloadError(
            f"cannot download {layout.title} from {url}: {_last_cause(error)}: check the network and the variables of "
            f"its proxy, or unpack a copy of the archive in {scratch.parent}"
        ) from error
    with tarfile.open(archive, "r:gz") as tar:
        tar.extractall(scratch, filter="data")
    layout.check(scratch / layout.folder)
    return scratch / layout.folder


def _last_cause(error: Exception) -> str:
    """In one line, without the names of the classes around it."""
    cause = getattr(error.args[0], "reason", error) if error.args else error
    return " ".join(str(cause).split()).rsplit("): ", 1)[-1].rstrip(".\"')") or type(error).__name__


CIFAR10 = Layout(
    name="cifar10",
    title="CIFAR-10",
    folder="cifar-10-batches-bin",
    train={f"data_batch_{number}.bin": 10_000 for number in range(1, 6)},
    test={"test_batch.bin": 10_000},
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
    train={"train.bin": 50_000},
    test={"test.bin": 10_000},
    label_bytes=2,  # the coarse label of 20, and the fine one of 100
    classes=100,
    names_file="fine_label_names.txt",
    archive="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
    md5="03b5dce01913d631647c71ecec9e9cb8",  # published on the same page
)
