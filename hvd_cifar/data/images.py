"""Arrays of images uint8 [n, height, width, channels] that need not be in memory.

Every rank of a host reads the operating system's one copy of a file. Files are read, not mapped: where a mapped file
becomes shorter, the system ends the process without a word (SIGBUS).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.sampler import spread
from hvd_cifar.errors import UserError

CHUNK_BYTES = 1 << 24  # of images that are read at a time
MOST_MEASURED = 5000  # images that are read one at a time, for channel statistics


class ImageArray(Protocol):
    """Images uint8 [n, height, width, channels] that need not be in memory, by the methods of an array."""

    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, height, width, channels]."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        """The images of a slice, or of indices int64 [b], in their order."""


Images = NDArray[np.uint8] | ImageArray


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
        """Records have `label_bytes`, then pixels of (height, width, channels); `planes`: channel after channel."""
        self.files, self.label_bytes, self.planes = tuple(files), label_bytes, planes
        counts = [file.count for file in files]
        self._ends = np.cumsum(counts)  # of the files, in records
        self._begins = self._ends - counts
        self.shape = (sum(counts), *size)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy [b, height, width, channels] of the images of a slice, or of indices [b] from 0 on, in their order.

        Its memory keeps the order of the files, such as a plane for each channel: to reorder it takes longer than to
        read it. Errors as `RecordFile.read_into`.
        """
        _, height, width, channels = self.shape
        indices = np.arange(len(self))[index] if isinstance(index, slice) else np.asarray(index)
        records = np.empty((len(indices), self.label_bytes + height * width * channels), np.uint8)
        numbers = np.searchsorted(self._ends, indices, side="right")
        within = indices - self._begins[numbers]
        for record, number, place in zip(records, numbers.tolist(), within.tolist(), strict=True):
            self.files[number].read_into(record, place * records.shape[1])
        pixels = records[:, self.label_bytes :]
        if self.planes:
            return pixels.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        return pixels.reshape(-1, height, width, channels)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """All of it, in memory."""
        return np.asarray(self[:], dtype)


@dataclass(eq=False)
class Selected:
    """Images by their `index` int64 [n] among other `images`: an `ImageArray`."""

    images: Images
    index: NDArray[np.int64]
    dtype: Any = np.uint8

    @property
    def shape(self) -> tuple[int, ...]:
        """[n, height, width, channels]."""
        return (len(self.index), *self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        return self.images[self.index[index]]

    @property
    def digest(self) -> str:
        """Of what is selected from images that have a digest; "" where they have none."""
        whole = getattr(self.images, "digest", "")
        return whole and hashlib.sha256(whole.encode() + self.index.tobytes()).hexdigest()

    @property
    def crops(self) -> Callable[[NDArray[np.int64], Any], NDArray[np.uint8]] | None:
        """As `pictures.Pictures.crops`; None where the images have none."""
        crops = getattr(self.images, "crops", None)
        return crops and (lambda index, draws: crops(self.index[index], draws))


class Gathered:
    """Images that are read one at a time, from any object with a length and an item for each number: an `ImageArray`.

    Such are the random-access sources of grain and array_record.
    """

    dtype: Any = np.dtype(np.uint8)

    def __init__(self, source: Any) -> None:
        """`source[i]` is an image uint8 [height, width, channels] or [height, width]; its `digest` stands for all."""
        self.source, self.digest = source, str(getattr(source, "digest", ""))
        self.shape: tuple[int, ...] = (0, 0, 0, 0)
        if len(source):
            self.shape = (len(source), *self._one(0).shape)

    def _one(self, number: int) -> NDArray[np.uint8]:
        image = np.asarray(self.source[number])
        image = image[..., np.newaxis] if image.ndim == 2 else image
        first = self.shape[1:] if self.shape[0] else image.shape
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape != first:
            raise UserError(
                f"image {number} of a {type(self.source).__name__} is {image.dtype} of shape {list(image.shape)}, and "
                f"the first one's is {list(first)}: give each as uint8 [height, width, channels], all of one size"
            )
        return image

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> NDArray[np.uint8]:
        return np.stack([self._one(number) for number in np.arange(len(self))[index].tolist()])


def chunks(images: Images) -> Iterator[NDArray[np.uint8]]:
    """The images in order, some megabytes at a time: all of them may not fit into memory."""
    count = max(1, CHUNK_BYTES // max(1, int(np.prod(images.shape[1:]))))
    for first in range(0, len(images), count):
        yield images[first : first + count]


def channel_statistics(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel over all pixels; a channel without deviation gets 1.

    They are those of `MOST_MEASURED` images, evenly spaced, where each has to be read or decoded alone.
    """
    whole = images.images if isinstance(images, Selected) else images
    if getattr(whole, "digest", None) is not None and len(images) > MOST_MEASURED:
        images = Selected(images, spread(MOST_MEASURED, len(images)))
    sums = np.zeros((2, images.shape[-1]), np.int64)  # integers: exact, in any order
    for chunk in chunks(images):
        for channel in range(images.shape[-1]):
            counts = np.bincount(chunk[..., channel].ravel(), minlength=256)
            sums[:, channel] += counts @ np.arange(256), counts @ np.arange(256) ** 2
    pixels = int(np.prod(images.shape[:-1]))
    mean = sums[0] / pixels
    deviation = np.sqrt(np.maximum(sums[1] / pixels - np.square(mean), 0.0))
    return tuple(mean.tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist())
