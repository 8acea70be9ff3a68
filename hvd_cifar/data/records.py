"""Images in files, read by index. Every rank of a host reads the operating system's one copy of a file.

Files are read, not mapped: where a mapped file becomes shorter, the system ends the process without a word (SIGBUS).
Reading takes 0.9 to 1.6 us an image longer than a mapped file does, beside 20 to 40 us for the transforms (two shared
cores of an AMD EPYC, files in the page cache, batches of 64 to 1024; medians of 200 batches, with transforms of 30).
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.errors import UserError

ATTEMPTS = 10  # to cut a random part that fits into the image
CROP_DRAWS = 2 * ATTEMPTS + 2  # random numbers of an image: area and proportions of each attempt, row and column


def middle(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The middle of an image uint8 [height, width, channels], [*size, channels], without a copy."""
    top, left = (pixels.shape[0] - size[0]) // 2, (pixels.shape[1] - size[1]) // 2
    return pixels[top : top + size[0], left : left + size[1]]


class RecordFile:
    """A file of `count` records, open for reading. Raises UserError where it cannot be opened."""

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count
        try:
            self._opened = io.FileIO(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}: make it readable, or restore it") from None

    def read_into(self, buffer: NDArray[np.uint8], start: int) -> None:
        """Fill a buffer from byte `start` on. Raises UserError where the file has become shorter, or is unreadable."""
        try:
            got = os.preadv(self._opened.fileno(), [buffer.data], start)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}: restore it, and start again") from None
        if got != buffer.nbytes:
            raise UserError(f"{self.path} has become shorter while it was read: restore it, and start again")


class FileImages:
    """The images of several files as one array, uint8 [n, height, width, channels]; indexing it reads the files."""

    dtype = np.dtype(np.uint8)

    def __init__(self, files: Sequence[RecordFile], size: tuple[int, int, int], label_bytes: int, planes: bool) -> None:
        """Take open files.

        Args:
            size: (height, width, channels) of every image.
            label_bytes: before the pixels of a record.
            planes: whether a record has a plane for each channel, one after the other.
        """
        self.files, self.size = tuple(files), size
        self.label_bytes, self.planes = label_bytes, planes
        self.record_bytes = label_bytes + int(np.prod(size))
        counts = [file.count for file in files]
        self.ends = np.cumsum(counts)  # of the files, in records
        self._begins = self.ends - counts

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
            self.files[number].read_into(record, place * self.record_bytes)
        return records

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it, in memory."""
        return np.asarray(self[:], dtype)


class Pictures:
    """Images of many sizes in one file, as an array of images of one size: the middle of each.

    Attributes:
        size: (height, width, channels) of the middle.
        sizes: int [n, 2], height and width of each whole image.
        digest: of the file, by which hosts and runs compare it: reading it for that would take minutes.
    """

    dtype = np.dtype(np.uint8)

    def __init__(self, file: Path, sizes: NDArray[np.integer[Any]], size: tuple[int, int, int], digest: str) -> None:
        """Open the file, which has one image after the other. Raises UserError where it cannot be opened."""
        self.sizes, self.size, self.digest = sizes, size, digest
        self._file = RecordFile(file, len(sizes))
        self.ends = np.cumsum(sizes.astype(np.int64).prod(axis=1) * size[2])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """[n, height, width, channels], of the middle."""
        return len(self), *self.size

    def __len__(self) -> int:
        return len(self.sizes)

    def whole(self, number: int) -> NDArray[np.uint8]:
        """A whole image, uint8 [height, width, channels]. Raises UserError as `RecordFile.read_into`."""
        pixels = np.empty((*self.sizes[number].tolist(), self.size[2]), np.uint8)
        self._file.read_into(pixels, int(self.ends[number]) - pixels.nbytes)
        return pixels

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """The middle of each image of a slice, or of indices [b], uint8 [b, *size]; errors as `whole`."""
        numbers = np.arange(len(self))[index]
        images = np.empty((len(numbers), *self.size), np.uint8)
        for image, number in zip(images, numbers.tolist(), strict=True):
            image[:] = middle(self.whole(number), self.size[:2])
        return images

    def crops(self, index: NDArray[np.int64], draws: NDArray[np.float32]) -> NDArray[np.uint8]:
        """A random part of each image of indices [b], resized to uint8 [b, *size]; errors as `whole`.

        Args:
            draws: uniform in [0, 1), float32 [b, CROP_DRAWS].
        """
        from PIL import Image  # here: the peers of the benchmarks read CIFAR-10 with NumPy alone

        images = np.empty((len(index), *self.size), np.uint8)
        boxes = crop_boxes(self.sizes[index], self.size[:2], draws)
        for image, number, (top, left, height, width) in zip(images, index.tolist(), boxes.tolist(), strict=True):
            whole = Image.fromarray(self.whole(number).squeeze())
            box = (left, top, left + width, top + height)
            part = whole.resize(self.size[1::-1], Image.Resampling.BILINEAR, box)
            image[:] = np.asarray(part).reshape(self.size)
        return images


def crop_boxes(sizes: NDArray[np.integer[Any]], size: tuple[int, int], draws: NDArray[np.float32]) -> NDArray[np.int64]:
    """Random parts of images: 8% to 100% of the pixels, 3/4 to 4/3 of the proportions of `size`.

    The first of some attempts that fits into the image is taken, or else the largest square part in the middle. Only
    operations that IEEE 754 rounds correctly are used: every machine cuts the same parts.

    Source: Szegedy et al. 2015, "Going deeper with convolutions", section 6.

    Args:
        sizes: [b, 2], height and width of each image.
        draws: uniform in [0, 1), float32 [b, CROP_DRAWS].

    Returns:
        int64 [b, 4]: top, left, height and width of each part.
    """
    sizes, draw = sizes.astype(np.int64), draws.astype(np.float64)
    area = sizes.prod(axis=1)[:, None] * (0.08 + 0.92 * draw[:, :ATTEMPTS])
    ratio = (3 / 4 + 7 / 12 * draw[:, ATTEMPTS : 2 * ATTEMPTS]) * size[1] / size[0]
    parts = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(np.int64)  # [b, ATTEMPTS, 2]
    parts = np.maximum(parts, 1)
    fits = (parts <= sizes[:, None]).all(axis=2)
    part = parts[np.arange(len(parts)), fits.argmax(axis=1)]
    places = (draw[:, -2:] * (sizes - part + 1)).astype(np.int64)
    square = np.repeat(sizes.min(axis=1, keepdims=True), 2, axis=1)
    found = fits.any(axis=1, keepdims=True)
    part, places = np.where(found, part, square), np.where(found, places, (sizes - square) // 2)
    return np.concatenate([places, part], axis=1)
