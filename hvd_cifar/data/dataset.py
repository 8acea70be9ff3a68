"""What a data set is: images and labels by index, in a training and a test part; the images need not be in memory.

Every rank of a host reads the operating system's one copy of a file. Files are read, not mapped: where a mapped file
becomes shorter, the system ends the process without a word (SIGBUS).
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.sampler import held_out, spread
from hvd_cifar.errors import UserError, printable

UNNAMED = "arrays"  # the name of a set that was given none
CHUNK_BYTES = 1 << 24  # of images that are read at a time
MOST_MEASURED = 5000  # images that are read one at a time, for channel statistics

# uint8 [n, height, width, channels]: a NumPy array, or an object that need not be in memory, with an array's dtype,
# shape and length, and indexed by a slice or by int64 [b].
Images = Any


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples by index."""

    images: Images
    labels: NDArray[np.int32]  # [n], the number of each example's class
    numbers: NDArray[np.int64] | None = None  # [n], indices in the data set's training part; None: its own index

    def __len__(self) -> int:
        return len(self.labels)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of images and labels, by which hosts and runs compare their examples."""
        state = hashlib.sha256()
        if known := getattr(self.images, "digest", ""):
            state.update(known.encode())
        else:
            for chunk in chunks(self.images):
                state.update(np.ascontiguousarray(chunk).data)
        state.update(self.labels.tobytes())
        return state.hexdigest()


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set. `Dataset.from_arrays` makes one from arrays.

    Attributes:
        name: shown beside all results.
        train, test: the examples to learn from, and those to evaluate on.
        classes: labels are 0 to classes - 1.
        channel_mean, channel_deviation: of the training images' pixels, for each channel, on the scale 0 to 255.
        class_names: of the classes in order, or empty. Control characters in them, and in `name`, become escapes.
        validation: training examples that are held out; None: there are none, and evaluation is on `test`.
    """

    name: str
    train: Examples
    test: Examples
    classes: int
    channel_mean: tuple[float, ...]
    channel_deviation: tuple[float, ...]
    class_names: tuple[str, ...] = ()
    validation: Examples | None = None

    def __post_init__(self) -> None:
        # Terminals and logs get these texts.
        object.__setattr__(self, "name", printable(self.name))
        object.__setattr__(self, "class_names", tuple(map(printable, self.class_names)))

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(height, width, channels)."""
        _, height, width, channels = self.train.images.shape
        return height, width, channels

    @property
    def labels_in_words(self) -> tuple[str, ...]:
        """A name for each class: its own, or else its number."""
        return self.class_names or tuple(map(str, range(self.classes)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all images and labels, their shape and the number of classes."""
        parts = (self.train.digest, self.test.digest, self.image_shape, self.classes)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def hold_out(self, count: int, seed: int) -> Dataset:
        """The set with `count` of its training examples, drawn by seed, as its validation part.

        Channel statistics stay those of all training examples.

        Raises:
            UserError: where none would be left to train on.
        """
        if count >= len(self.train):
            raise UserError(f"--hold-out {count}: the training set has {len(self.train)} examples: hold out fewer")
        train, validation = (
            Examples(Selected(self.train.images, index), self.train.labels[index], index)
            for index in held_out(seed, len(self.train), count)
        )
        return replace(self, train=train, validation=validation)

    @classmethod
    def from_arrays(
        cls,
        train_images: Any,
        train_labels: Any,
        test_images: Any,
        test_labels: Any,
        *,
        name: str = UNNAMED,
        class_names: Sequence[str] = (),
    ) -> Dataset:
        """A data set from arrays. They are not copied, so a `np.memmap` stays on the disk.

        Args:
            train_images, test_images: uint8 [n, height, width, channels], or [n, height, width] for one channel; all
                of one size. A NumPy array, a tensor of TensorFlow or PyTorch, or an object whose item i is image i,
                such as a source of grain or array_record. Its attribute `digest`, a text, stands for its images where
                hosts and runs compare them; without it all are read for that.
            train_labels, test_labels: integers [n] or [n, 1] from 0 on.
            name: shown beside all results.
            class_names: of all classes, two or more, in order. Empty: there are as many classes as the largest label
                + 1.

        Raises:
            UserError: where the arrays do not make a data set; it names the part and what it must be.
        """
        class_names = tuple(map(str, class_names))
        train = _examples(f"data set {name}: the training", train_images, train_labels)
        test = _examples(f"data set {name}: the test", test_images, test_labels)
        if train.images.shape[1:] != test.images.shape[1:]:
            raise UserError(
                f"data set {name}: training images are {_size(train.images)} and test images {_size(test.images)} "
                "(height x width x channels): give both the same size"
            )
        classes = 1 + int(max(train.labels.max(), test.labels.max()))
        if class_names and classes > len(class_names):
            raise UserError(
                f"data set {name}: label {classes - 1} has no name, since class_names names {len(class_names)} "
                f"classes: name all, or give labels from 0 to {len(class_names) - 1}"
            )
        if (len(class_names) or classes) < 2:
            raise UserError(f"data set {name}: all labels are 0: give examples of two or more classes")
        mean, deviation = channel_statistics(train.images)
        return cls(name, train, test, len(class_names) or classes, mean, deviation, class_names)


def _examples(part: str, images: Any, labels: Any) -> Examples:
    def refuse(what: str, remedy: str) -> NoReturn:
        raise UserError(f"{part} {what}: {remedy}")

    if hasattr(images, "numpy"):  # a tensor
        images = images.numpy()
    by_number = all(hasattr(images, name) for name in ("__getitem__", "__len__"))
    if by_number and not hasattr(images, "shape") and not isinstance(images, list | tuple):
        images = Gathered(images)
    shape, kind = getattr(images, "shape", None), getattr(images, "dtype", None)
    wanted = "give a NumPy array of uint8, [n, height, width, channels]"
    if shape is None or kind is None:
        refuse(f"images are a {type(images).__name__}", wanted)
    if kind != np.uint8:
        refuse(f"images are {kind}", f"{wanted}, of values from 0 to 255")
    if isinstance(images, np.ndarray):
        images = np.asarray(images)  # each indexing of a np.memmap would take microseconds more
        images = images[..., np.newaxis] if images.ndim == 3 else images
    if len(images.shape) != 4:
        refuse(f"images have the shape {list(shape)}", wanted)
    if images.shape[1] <= 4 < images.shape[3]:
        refuse(f"images have the shape {list(shape)}, channels first", "put them last: images.transpose(0, 2, 3, 1)")
    if not all(images.shape):
        refuse(f"images are empty (shape {list(shape)})", "give at least one example")

    labels = np.asarray(labels)
    if labels.ndim == 2 and labels.shape[1] == 1:  # the shape in Keras's data sets
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        refuse(f"labels are {labels.dtype} of shape {list(labels.shape)}", "give integers [n]")
    if len(labels) != len(images):
        refuse(f"part has {len(images):,} images but {len(labels):,} labels", "give one label for each image")
    wrong = np.flatnonzero((labels < 0) | (labels >= np.iinfo(np.int32).max))
    if wrong.size:
        refuse(f"label of example {wrong[0]} is {labels[wrong[0]]}", "give numbers of classes, from 0 on")
    return Examples(images, labels.astype(np.int32))


def _size(images: Images) -> str:
    return " x ".join(map(str, images.shape[1:]))


def opened(path: Path) -> io.FileIO:
    """A file for `read_into`. Raises UserError where it cannot be opened."""
    try:
        return io.FileIO(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: make it readable, or restore it") from None


def read_into(buffer: NDArray[np.uint8], file: io.FileIO, start: int) -> None:
    """Fill a buffer from byte `start` on. Raises UserError where the file has become shorter, or is unreadable."""
    try:
        got = os.preadv(file.fileno(), [buffer.data], start)
    except OSError as error:
        raise UserError(f"cannot read {file.name}: {error.strerror}: restore it, and start again") from None
    if got != buffer.nbytes:
        raise UserError(f"{file.name} has become shorter while it was read: restore it, and start again")


class FileImages:
    """The images of several files as one array, uint8 [n, height, width, channels]; indexing it reads the files."""

    dtype = np.dtype(np.uint8)

    def __init__(
        self, files: Mapping[Path, int], size: tuple[int, int, int], label_bytes: int = 0, planes: bool = False
    ) -> None:
        """Of each file so many records: `label_bytes`, then pixels of `size`; `planes`: channel after channel."""
        self.files, self.label_bytes, self.planes = [opened(path) for path in files], label_bytes, planes
        counts = list(files.values())
        self._ends = np.cumsum(counts)  # of the files, in records
        self._begins = self._ends - counts
        self.shape = (sum(counts), *size)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | NDArray[np.int64]) -> NDArray[np.uint8]:
        """A copy [b, height, width, channels] of the images of a slice, or of indices [b] from 0 on, in their order.

        Its memory keeps the order of the files, such as a plane for each channel: to reorder it takes longer than to
        read it. Errors as `read_into`.
        """
        count, height, width, channels = self.shape
        indices = np.arange(count)[index] if isinstance(index, slice) else np.asarray(index)
        records = np.empty((len(indices), self.label_bytes + height * width * channels), np.uint8)
        numbers = np.searchsorted(self._ends, indices, side="right")
        within = indices - self._begins[numbers]
        for record, number, place in zip(records, numbers.tolist(), within.tolist(), strict=True):
            read_into(record, self.files[number], place * records.shape[1])
        pixels = records[:, self.label_bytes :]
        if self.planes:
            return pixels.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
        return pixels.reshape(-1, height, width, channels)


@dataclass(eq=False)
class Selected:
    """Images by their `index` int64 [n] among other `images`."""

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
    """Images that are read one at a time from a `source`, such as a random-access source of grain or array_record.

    `source[i]` is an image uint8 [height, width, channels] or [height, width]; its `digest` stands for all.
    """

    dtype: Any = np.dtype(np.uint8)

    def __init__(self, source: Any) -> None:
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
