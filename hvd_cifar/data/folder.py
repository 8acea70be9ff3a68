"""Images in folders, one for each class: PATH/train/CLASS/*.png, PATH/test/CLASS/*.png.

They are decoded once per host, into a cache of arrays that every rank reads by index. The cache is beside the images,
or in the data folder where that place cannot be written. It is made again when an image's name, size or modification
time differs. Subfolders and links are followed; what begins with a dot is left out.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from hvd_cifar.data.dataset import Dataset, Examples, channel_statistics
from hvd_cifar.data.place import NOBODY, Onlooker, locked, searched
from hvd_cifar.data.records import FileImages, RecordFile
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.fields import BUILT_IN_DATASETS, FOLDER_DATASET
from hvd_cifar.files import LastingStream, read_json, replace_text

EXTENSIONS = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
TEST_FOLDERS = ("test", "val")
GREY_MODES = ("1", "L", "LA")  # Pillow's names
DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a channel
CACHE = ".hvd_cifar-cache"
PARTS = ("train", "test")
FILES = (*(f"{part}-{what}.npy" for part in PARTS for what in ("images", "labels")), "about.json")
NOTE = "done"  # file in an unfinished cache: channels, and number of images decoded
CHUNK = 512  # images decoded between two updates of that file
# Pillow warns of a large image, but refuses one of more than twice the limit: that refusal is enough.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        classes: names, in the order of the labels.
        images: of each part, in order, path and label.
        fingerprint: of all paths, sizes and modification times.
    """

    classes: tuple[str, ...]
    images: dict[str, list[tuple[Path, int]]]
    fingerprint: str


@dataclass(frozen=True)
class Folder:
    """A folder of images: see `source.Source`."""

    path: Path
    data_dir: Path

    @property
    def name(self) -> str:
        """folder:PATH."""
        return f"folder:{self.path}"

    @property
    def place(self) -> None:
        """None: `locate` looks for images, not for a cache."""

    def locate(self, onlooker: Onlooker = NOBODY) -> Path | None:
        """The folder of the cache, made if need be; None where there are no images. Raises UserError as `prepare`."""
        with searched(self.path):
            return self.prepare(onlooker) if self.path.is_dir() else None

    def prepare(self, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the cache.

        Raises:
            UserError: where an image is missing, unreadable or of another size, or a folder cannot be read or written.
        """
        with searched(self.path):
            return self._prepare(onlooker)

    def _prepare(self, onlooker: Onlooker) -> Path:
        listing = list_images(self.path)
        home = self.path / CACHE
        made = home / listing.fingerprint
        if all(os.access(made / name, os.R_OK) for name in FILES):
            return made  # also where others made it, and this user may not write
        if not os.access(home if home.exists() else self.path, os.W_OK):
            key = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]
            home = self.data_dir / f"folder-{self.path.name}-{key}"
        place = home / listing.fingerprint
        if not place.is_dir():
            with locked(home, onlooker):
                if not place.is_dir():  # else another process made it while this one waited
                    os.rename(_decode_all(listing, home, self.path.name, onlooker), place)
                    # Hosts may share the data folder, with copies of the images that have other times.
                    if home.name == CACHE:
                        _remove_others(place)
        return place

    def files(self, folder: Path) -> tuple[str, ...]:
        """The files of a cache."""
        return FILES

    def fault(self, folder: Path) -> str | None:
        """Which file of a cache is missing."""
        missing = [name for name in FILES if not (folder / name).is_file()]
        return f"{folder / missing[0]} is missing" if missing else None

    def read(self, folder: Path) -> Dataset:
        """The set in a cache. Raises UserError where it is damaged."""
        try:
            parts = [
                Examples(_images(folder / f"{part}-images.npy"), np.load(folder / f"{part}-labels.npy"))
                for part in PARTS
            ]
            about = read_json(folder / FILES[-1])
            names = tuple(map(str, about["class_names"]))
            mean, deviation = tuple(map(float, about["channel_mean"])), tuple(map(float, about["channel_deviation"]))
            for part in parts:
                _check(part, len(names), len(mean), len(deviation))
            name = _as_text(self.path.name)
            name = FOLDER_DATASET + name if name in BUILT_IN_DATASETS else name  # it is not that set
            return Dataset(name, parts[0], parts[1], len(names), mean, deviation, names)
        except Exception as error:  # NumPy raises many kinds for a damaged header
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{folder} is damaged ({reason}): remove it") from None


def _remove_others(place: Path) -> None:
    """Remove the caches of earlier contents of the folder."""
    for old in place.parent.iterdir():
        if old.is_dir() and old != place:
            shutil.rmtree(old, ignore_errors=True)


def _check(part: Examples, classes: int, *channels: int) -> None:
    """Raise ValueError where images, labels and what the cache says of them do not fit."""
    labels = part.labels
    if labels.dtype != np.int32 or labels.shape != (len(part.images),) or not len(labels):
        raise ValueError(f"{len(part.images)} images, labels {labels.dtype} of shape {labels.shape}")
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"labels from {labels.min()} to {labels.max()} of {classes} classes")
    if set(channels) != {part.images.shape[3]}:
        raise ValueError(f"statistics of {channels} channels")


def _images(path: Path) -> FileImages:
    """The images in a file that `np.save` wrote. Raises ValueError where it is no such file."""
    mapped = np.lib.format.open_memmap(path, mode="r")
    if mapped.dtype != np.uint8 or mapped.ndim != 4 or not mapped.flags.c_contiguous:
        raise ValueError(f"{path.name} holds no images")
    height, width, channels = mapped.shape[1:]
    return FileImages([RecordFile(path, len(mapped), mapped.offset)], (height, width, channels), 0, planes=False)


def list_images(path: Path) -> Listing:
    """The images below a folder, by class, in the order of their names.

    Raises:
        UserError: where the folder has another layout.
    """
    where = f"--dataset folder:{path}"
    if not path.is_dir():
        raise UserError(f"{where}: there is no such folder; give one with train/CLASS/*.png and test/CLASS/*.png")
    test = next((name for name in TEST_FOLDERS if (path / name).is_dir()), None)
    if test is None or not (path / "train").is_dir():
        missing = "train" if test else "test or val"
        raise UserError(f"{where}: it has no folder {missing}; make it, with a folder for each class")
    classes = _folders(path / "train")
    if len(classes) == 1:
        raise UserError(f"{where}: train has one class, {classes[0]}; give each class a folder in train, two or more")
    unknown = [name for name in _folders(path / test) if name not in classes]
    if unknown:
        raise UserError(
            f"{where}: {test}/{unknown[0]} is no class of train; give it images in train/{unknown[0]}, or remove it"
        )
    label_of = {name: label for label, name in enumerate(classes)}
    images: dict[str, list[tuple[Path, int]]] = {"train": [], "test": []}
    state = hashlib.sha256(b"upright")  # how images are decoded: a change here makes old caches anew
    for part, name in zip(PARTS, ("train", test), strict=True):
        for kind in _folders(path / name):
            found = sorted(map(_stated, images_below(path / name / kind)))
            if not found and part == "train":
                raise UserError(
                    f"{where}: train/{kind} has no images ({', '.join(EXTENSIONS)}); add some, or remove it"
                )
            for image, size, changed in found:
                state.update(os.fsencode(f"{image.relative_to(path)}\0{size}\0{changed}\n"))
                images[part].append((image, label_of[kind]))
        if not images[part]:
            raise UserError(f"{where}: {name} has no images in folders of classes ({', '.join(EXTENSIONS)}); add some")
    return Listing(tuple(map(_as_text, classes)), images, state.hexdigest()[:16])


def _as_text(name: str) -> str:
    """A file's name as text that every file and terminal takes: bytes that are not UTF-8 become `\\xff`."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _folders(path: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def images_below(folder: Path, extensions: tuple[str, ...] = EXTENSIONS, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """The images below a folder, by their extensions. Links are followed, and hidden files and folders left out.

    Args:
        above: real paths of the folders that this one is in: a link back to one of them is not followed.

    Raises:
        OSError: where a folder cannot be read.
    """
    within = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        seen = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in seen:
        if os.path.isdir(entry):
            if os.path.realpath(entry) not in within:
                yield from images_below(folder / entry.name, extensions, within)
        elif entry.name.lower().endswith(extensions):
            yield folder / entry.name


def _stated(image: Path) -> tuple[Path, int, int]:
    """An image's path, bytes and modification time. Raises UserError for a link that leads nowhere."""
    try:
        found = image.stat()
    except OSError as error:
        raise _unreadable(image, error) from None
    return image, found.st_size, found.st_mtime_ns


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot read the image {path} ({' '.join(reason_of(error).split())}): restore it, or remove it")


class _NotGrey(Exception):
    """An image has colours, and the first one has none."""


def _decode_all(listing: Listing, home: Path, name: str, onlooker: Onlooker) -> Path:
    """Make the cache in a folder of `home`; goes on where a killed process stopped."""
    part = home / f"{listing.fingerprint}.part"
    first, _ = listing.images["train"][0]
    with _opened(first) as image:
        size, grey = image.size, image.mode in GREY_MODES
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Under a launcher stderr is a pipe, which rich does not take for a terminal.
    console = Console(file=cast(TextIO, LastingStream(sys.stderr)), force_terminal=True)
    with Progress(*columns, console=console, disable=not onlooker.sees_bar) as progress:
        task = progress.add_task(f"decoding {_as_text(name)}", total=sum(map(len, listing.images.values())))

        def show(done: int) -> None:
            progress.update(task, completed=done)
            onlooker.is_told()

        try:
            _write(listing, part, size, 1 if grey and not _done(part, 3) else 3, show)
        except _NotGrey:
            shutil.rmtree(part)
            _write(listing, part, size, 3, show)
    return part


def _write(listing: Listing, part: Path, size: tuple[int, int], channels: int, show: Callable[[int], None]) -> None:
    """Decode all images, in order; all must have the size (width, height). `show` is told how many are decoded."""
    done = _done(part, channels)
    if not done:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
    show(done)
    arrays = {
        name: np.lib.format.open_memmap(
            part / f"{name}-images.npy",
            mode="r+" if done else "w+",
            dtype=np.uint8,
            shape=(len(images), size[1], size[0], channels),
        )
        for name, images in listing.images.items()
    }
    if not done:
        _allocate(part, {f"{name}-images.npy": array.offset + array.nbytes for name, array in arrays.items()})
    before = 0  # images of earlier parts
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for name, images in listing.images.items():
            for first in range(max(0, done - before), len(images), CHUNK):
                chunk = images[first : first + CHUNK]
                decoded = pool.map(lambda image: _decode(image[0], size, channels), chunk)
                for row, pixels in enumerate(decoded, start=first):
                    arrays[name][row] = pixels
                arrays[name].flush()  # on the disk before they count as decoded
                done = before + first + len(chunk)
                replace_text(part / NOTE, f"{channels} {done}")
                show(done)
            before += len(images)
            np.save(part / f"{name}-labels.npy", np.array([label for _, label in images], np.int32))
    mean, deviation = channel_statistics(np.asarray(arrays["train"]))
    about = {"class_names": listing.classes, "channel_mean": mean, "channel_deviation": deviation}
    (part / FILES[-1]).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    (part / NOTE).unlink()


def _allocate(part: Path, sizes: dict[str, int]) -> None:
    """Allocate all bytes of files: a write to mapped memory for which the disk has no space ends the process.

    Raises OSError where there is no space; the folder is then removed.
    """
    for name, size in sizes.items():
        with (part / name).open("r+b") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as failure:
                shutil.rmtree(part)
                raise OSError(failure.errno, failure.strerror, str(part / name)) from None


def _done(part: Path, channels: int) -> int:
    """How many images an earlier process has decoded for this cache."""
    try:
        noted, count = map(int, (part / NOTE).read_text().split())
    except (OSError, ValueError):
        return 0
    return count if noted == channels else 0


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image, upright. Raises UserError where it cannot be opened, or read in the `with` block."""
    try:
        with Image.open(path) as image:
            yield ImageOps.exif_transpose(image)
    except (UserError, _NotGrey):
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise _unreadable(path, error) from None


def _decode(path: Path, size: tuple[int, int], channels: int) -> NDArray[np.uint8]:
    """The pixels of an image, upright, uint8 [height, width, channels]; transparency is left out."""
    with _opened(path) as image:
        if image.size != size:
            here, first = ("x".join(map(str, pixels)) for pixels in (image.size, size))
            raise UserError(
                f"{path} is {here} pixels, and the first image {first}: make all images one size, or leave it out"
            )
        if channels == 1 and image.mode not in (*GREY_MODES, *DEEP_MODES):
            raise _NotGrey
        return _pixels(image, path, channels)


def read_image(path: Path, channels: int) -> NDArray[np.uint8]:
    """The pixels of any image that Pillow reads, uint8 [height, width, channels], upright.

    Args:
        channels: 1: grey, or 3: red, green and blue. Transparency is left out.

    Raises:
        UserError: where it cannot be read, or is grey with more than 8 bits.
    """
    with _opened(path) as image:
        return _pixels(image, path, channels)


def _pixels(image: Image.Image, path: Path, channels: int) -> NDArray[np.uint8]:
    if image.mode in DEEP_MODES:
        raise UserError(f"{path} has more than 8 bits a channel ({image.mode}): convert it to 8 bits")
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(image.height, image.width, channels)
