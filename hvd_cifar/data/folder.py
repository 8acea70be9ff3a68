"""Images in folders, one for each class: PATH/train/CLASS/*.png, PATH/test/CLASS/*.png.

They are decoded once per host, into a cache of raw pixels that every rank reads by index. The cache is beside the
images, or in the data folder where that place cannot be written. It is made again when an image's name, size or
modification time differs, and when its own bytes are damaged. Subfolders and links are followed; what begins with a dot
is left out.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from rich.progress import MofNCompleteColumn

from hvd_cifar.data.dataset import Dataset, Examples, channel_statistics
from hvd_cifar.data.place import NOBODY, Onlooker, digest_of, locked, searched
from hvd_cifar.data.records import FileImages, RecordFile
from hvd_cifar.errors import UserError, printable, reason_of
from hvd_cifar.fields import BUILT_IN_DATASETS, FOLDER_DATASET
from hvd_cifar.files import read_json, replace_text

EXTENSIONS = (
    *(".avif", ".bmp", ".gif", ".ico", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pcx", ".pgm"),
    *(".png", ".pnm", ".ppm", ".qoi", ".tga", ".tif", ".tiff", ".webp"),
)
LAYOUT = "train/CLASS/*.png and test/CLASS/*.png"
TEST_FOLDERS = ("test", "val", "valid", "validation")
GREY_MODES = ("1", "L", "LA")  # Pillow's names
DEEP_MODES = ("F", "I", "I;16", "I;16B", "I;16L", "I;16N")  # more than 8 bits a channel
CACHE = ".hvd_cifar-cache"
ABOUT = "about.json"
FILES = ("train.bin", "test.bin", ABOUT)
CHUNK = 512  # images decoded between two reports of progress
MOST_NAMED = 20  # unusable images in one message
# Pillow warns of a large image, but refuses one of more than twice the limit: that refusal is enough.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        classes: names, in the order of the labels.
        images: of the training and the test part, by class, in order.
        fingerprint: of all paths, sizes and modification times.
        left_out: what is not used, in words; empty where everything is.
    """

    classes: tuple[str, ...]
    images: tuple[Sequence[Sequence[Path]], Sequence[Sequence[Path]]]
    fingerprint: str
    left_out: str

    def of_part(self, part: int) -> list[Path]:
        """All images of a part, in the order of their labels."""
        return [image for of_class in self.images[part] for image in of_class]


@dataclass(frozen=True)
class Folder:
    """A folder of images; see `source.Source` for its functions."""

    path: Path
    data_dir: Path

    def locate(self, onlooker: Onlooker = NOBODY) -> Path | None:
        """The folder of the cache, made if need be; None where there are no images. Raises UserError as `prepare`."""
        with searched(self.path):
            return self.prepare(onlooker) if self.path.is_dir() else None

    def prepare(self, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the cache, its bytes compared with their checksums.

        Raises:
            UserError: where an image is missing, unreadable or of another size, or a folder cannot be read or written.
        """
        with searched(self.path):
            listing = list_images(self.path)
            if listing.left_out:
                onlooker.is_warned(f"hvd_cifar: note: --dataset folder:{self.path}: left out: {listing.left_out}")
            home = self.path / CACHE
            place = home / listing.fingerprint
            if _is_whole(place):
                return place  # also where others made it, and this user may not write
            if not os.access(home if home.exists() else self.path, os.W_OK):
                key = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]
                home = self.data_dir / f"folder-{self.path.name}-{key}"
                place = home / listing.fingerprint
            if not _is_whole(place):
                with locked(home, onlooker) as told:
                    if not _is_whole(place):  # else another process made it while this one waited
                        shutil.rmtree(place, ignore_errors=True)
                        os.rename(_decode_all(listing, home, self.path.name, told), place)
                        # Hosts may share the data folder, with copies of the images that have other times.
                        if home.name == CACHE:
                            _remove_others(place)
            return place

    def read(self, folder: Path) -> Dataset:
        """The set in a cache. Raises UserError where it is damaged."""
        try:
            about = read_json(folder / ABOUT)
            names = tuple(map(str, about["class_names"]))
            shape = height, width, channels = tuple(map(int, about["size"]))
            mean, deviation = (tuple(map(float, about[name])) for name in ("channel_mean", "channel_deviation"))
            parts = []
            for name, counts in zip(FILES, about["counts"], strict=False):
                if (folder / name).stat().st_size != sum(counts) * math.prod(shape) or min(sum(counts), *shape) < 1:
                    raise ValueError(f"{name} does not hold {sum(counts)} images of {height} x {width} x {channels}")
                images = FileImages(
                    [RecordFile(folder / name, sum(counts))], (height, width, channels), 0, planes=False
                )
                parts.append(Examples(images, np.repeat(np.arange(len(names), dtype=np.int32), counts)))
            if not len(mean) == len(deviation) == channels:
                raise ValueError("statistics of other channels")
            train, test = parts
        except UserError:
            raise
        except Exception as error:  # a damaged description leads to errors of many kinds
            raise UserError(f"{folder} is damaged ({' '.join(str(error).split())[:200]}): remove it") from None
        name = _as_text(self.path.name)
        name = FOLDER_DATASET + name if name in BUILT_IN_DATASETS else name  # it is not that set
        return Dataset(name, train, test, len(names), mean, deviation, names)


def _is_whole(place: Path) -> bool:
    """Whether a cache has all its files, with the bytes that were written into them."""
    try:
        expected = read_json(place / ABOUT)["sha256"]
        return all(digest_of(place / name) == expected[name] for name in FILES if name != ABOUT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _remove_others(place: Path) -> None:
    """Remove the caches of earlier contents of the folder."""
    for old in place.parent.iterdir():
        if old.is_dir() and old != place:
            shutil.rmtree(old, ignore_errors=True)


def list_images(path: Path) -> Listing:
    """The images below a folder, by class, in the order of their names.

    Raises:
        UserError: where the folder has another layout.
    """
    where, readable = f"--dataset folder:{path}", ", ".join(EXTENSIONS)
    if not path.is_dir():
        raise UserError(f"{where}: there is no such folder; give one with {LAYOUT}")
    tests = [name for name in TEST_FOLDERS if (path / name).is_dir()]
    if not tests or not (path / "train").is_dir():
        missing = "train" if tests else ", ".join(TEST_FOLDERS[:-1]) + f" or {TEST_FOLDERS[-1]}"
        raise UserError(f"{where}: it has no folder {missing}; make it, with a folder for each class")
    classes = _folders(path / "train")
    if len(classes) == 1:
        raise UserError(f"{where}: train has one class, {classes[0]}; give each class a folder in train, two or more")
    if unknown := [name for name in _folders(path / tests[0]) if name not in classes]:
        raise UserError(
            f"{where}: {tests[0]}/{unknown[0]} is no class of train; give it images in train/{unknown[0]}, or remove it"
        )
    left_out: Counter[str] = Counter()
    state = hashlib.sha256(b"upright, raw")  # how images are decoded: a change here makes old caches anew
    parts = []
    for part in ("train", tests[0]):
        left_out["outside the folders of classes"] += sum(not entry.is_dir() for entry in (path / part).iterdir())
        present = [name if (path / part / name).is_dir() else "" for name in classes]
        parts.append([sorted(images_below(path / part / name, left_out)) if name else [] for name in present])
        empty = [name for name, images in zip(classes, parts[-1], strict=True) if not images]
        if part == "train" and empty:
            raise UserError(f"{where}: train/{empty[0]} has no images ({readable}); add some, or remove it")
        if len(empty) == len(classes):
            raise UserError(f"{where}: {part} has no images in folders of classes ({readable}); add some")
        for image in (image for images in parts[-1] for image in images):
            state.update(os.fsencode(f"{image.relative_to(path)}\0{_state(image)}\n"))
    others = [f"{name}/ ({tests[0]}/ is used)" for name in tests[1:]]
    counts = [f"{count} {kind}" for kind, count in sorted(left_out.items()) if count]
    return Listing(
        tuple(map(_as_text, classes)), (parts[0], parts[1]), state.hexdigest()[:16], ", ".join(others + counts)
    )


def _as_text(name: str) -> str:
    """A file's name as text that every file and terminal takes: bytes that are not UTF-8 become `\\xff`."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def _folders(path: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def images_below(folder: Path, left_out: Counter[str] | None = None, above: tuple[str, ...] = ()) -> Iterator[Path]:
    """The files below a folder that Pillow reads, by their extensions. Links are followed; hidden ones are left out.

    Args:
        left_out: counts the files that are left out, by extension.
        above: real paths of the folders that this one is in: a link back to one of them is not followed.

    Raises:
        OSError: where a folder cannot be read.
    """
    within = (*above, os.path.realpath(folder))
    with os.scandir(folder) as entries:
        seen = list(entries)
    for entry in seen:
        if entry.name.startswith("."):
            kind = "hidden"
        elif os.path.isdir(entry):
            if os.path.realpath(entry) not in within:
                yield from images_below(folder / entry.name, left_out, within)
            continue
        elif entry.name.lower().endswith(EXTENSIONS):
            yield folder / entry.name
            continue
        else:
            kind = Path(entry.name).suffix.lower() or "without an extension"
        if left_out is not None:
            left_out[printable(kind)] += 1


def _state(image: Path) -> str:
    try:
        found = image.stat()
    except OSError:
        return "unreadable"  # the decoder says why
    return f"{found.st_size}\0{found.st_mtime_ns}"


class Unusable(UserError):
    """An image that cannot be decoded, or does not fit the others."""

    def __init__(self, path: Path, reason: str) -> None:
        self.text = f"{path} ({reason})"
        super().__init__(f"cannot read the image {self.text}: restore it, or remove it")


class _NotGrey(Exception):
    """An image has colours, and the first one has none."""


def _decode_all(listing: Listing, home: Path, name: str, onlooker: Onlooker) -> Path:
    """Make the cache in a folder of `home`; goes on where a killed process stopped."""
    size, grey = _first(listing.of_part(0))
    parts = {channels: home / f"{listing.fingerprint}-{channels}.part" for channels in (1, 3)}
    with onlooker.progress(f"decoding {_as_text(name)}", MofNCompleteColumn()) as show:
        try:
            if grey and not parts[3].exists():
                return _write(listing, parts[1], (size[1], size[0], 1), show)
        except _NotGrey:
            shutil.rmtree(parts[1])
        return _write(listing, parts[3], (size[1], size[0], 3), show)


def _first(images: Sequence[Path]) -> tuple[tuple[int, int], bool]:
    """The size (width, height) of the first image that can be read, and whether it is grey."""
    for path in images:
        with suppress(UserError), _opened(path) as image:
            return image.size, image.mode in GREY_MODES
    return (0, 0), False


def _write(listing: Listing, part: Path, shape: tuple[int, int, int], show: Callable[[int, int], None]) -> Path:
    """Decode all images into the folder `part`; all must have the shape (height, width, channels)."""
    part.mkdir(exist_ok=True)
    unusable: list[str] = []
    parts = [listing.of_part(number) for number in range(2)]
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            for before, name, images in zip((0, len(parts[0])), FILES, parts, strict=False):
                with open(part / name, "ab") as file:
                    done = file.tell() // math.prod(shape)  # whole images, of a process that was killed
                    file.truncate(done * math.prod(shape))
                    for first in range(done, len(images), CHUNK):
                        chunk = images[first : first + CHUNK]
                        for found in pool.map(partial(_decode, shape=shape), chunk):
                            if isinstance(found, str):
                                unusable.append(found)
                            elif not unusable:  # else the rest is decoded to name all unusable images at once
                                file.write(found.data)
                        show(before + first + len(chunk), sum(map(len, parts)))
                        if len(unusable) >= MOST_NAMED:
                            break
        if unusable:
            more = f" and {len(unusable) - MOST_NAMED} more" * (len(unusable) > MOST_NAMED)
            raise UserError(
                f"cannot use {', '.join(unusable[:MOST_NAMED])}{more}: restore or remove damaged images, and make all "
                "one size"
            )
        _describe(listing, part, shape)
    except (OSError, UserError):
        shutil.rmtree(part)  # it would keep a full disk full
        raise
    return part


def _describe(listing: Listing, part: Path, shape: tuple[int, int, int]) -> None:
    """Write what `Folder.read` needs to know of a cache, and the checksums of its files."""
    train = FileImages([RecordFile(part / FILES[0], len(listing.of_part(0)))], shape, 0, planes=False)
    mean, deviation = channel_statistics(train)
    about = {
        "class_names": listing.classes,
        "size": shape,
        "counts": [[len(images) for images in of_part] for of_part in listing.images],
        "channel_mean": mean,
        "channel_deviation": deviation,
        "sha256": {name: digest_of(part / name) for name in FILES if name != ABOUT},
    }
    replace_text(part / ABOUT, json.dumps(about, indent=1) + "\n")


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An image, upright. Raises Unusable where it cannot be opened, or read in the `with` block."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Unusable(path, "it is no regular file")  # a FIFO would be waited for
        with Image.open(path) as image:
            yield ImageOps.exif_transpose(image)
    except (UserError, _NotGrey):
        raise
    except Exception as error:  # Pillow raises many kinds for a damaged file
        raise Unusable(path, " ".join(reason_of(error).split())) from None


def _decode(path: Path, shape: tuple[int, int, int]) -> NDArray[np.uint8] | str:
    """The pixels of an image, upright, uint8 [height, width, channels]; or which image is unusable, and why."""
    height, width, channels = shape
    try:
        with _opened(path) as image:
            if image.size != (width, height):
                raise Unusable(path, f"{image.width}x{image.height} pixels, and the first image has {width}x{height}")
            if channels == 1 and image.mode not in (*GREY_MODES, *DEEP_MODES):
                raise _NotGrey
            return _pixels(image, path, channels)
    except Unusable as error:
        return error.text


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
        raise Unusable(path, f"more than 8 bits a channel, {image.mode}")
    pixels = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return pixels.reshape(image.height, image.width, channels)
