"""Images in folders, one for each class, and their cache.

The images are decoded once per host, on all cores, into a cache of raw pixels that every rank reads by index. The cache
is beside the images, or in the data folder where that place cannot be written. It is made again when an image's name,
size or modification time differs, and when its own bytes are damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.dataset import Dataset, Examples
from hvd_cifar.data.host_files import NOBODY, Onlooker, Progress, digest_of, locked, searched
from hvd_cifar.data.images import FileImages, RecordFile, Selected, channel_statistics
from hvd_cifar.data.listing import Listing, as_text, list_images
from hvd_cifar.data.pictures import Head, Pictures, Pixels, Size, Unusable, decode, head, scaled_bytes
from hvd_cifar.errors import UserError
from hvd_cifar.fields import BUILT_IN_DATASETS, FOLDER_DATASET
from hvd_cifar.files import read_json, replace_text

CACHE = ".hvd_cifar-cache"
IMAGES, SIZES, ABOUT = "images.bin", "sizes.npy", "about.json"
CHUNK = 256  # images between two reports of progress
MOST_NAMED = 20  # unusable images in one message
PROPOSED = (224, 192, 160, 128, 96, 64, 48, 32)  # image sizes, the largest first

T = TypeVar("T")


@dataclass(frozen=True)
class Folder:
    """A folder of images, a `source.Source`.

    Attributes:
        image_size: height and width of what the net sees, which images are scaled for; None: all have one size.
        max_unreadable: images that may be left out since they cannot be read.
    """

    path: Path
    image_size: Size | None = None
    max_unreadable: int = 0
    files = (IMAGES, SIZES, ABOUT)

    @property
    def name(self) -> str:
        """What `--dataset` calls it."""
        return f"{FOLDER_DATASET}{self.path}"

    def locate(self, data_dir: Path, onlooker: Onlooker = NOBODY) -> Path | None:
        """The folder of the cache, made if need be; None where there are no images. Raises UserError as `prepare`."""
        with searched(self.path):
            return self.prepare(data_dir, onlooker) if self.path.is_dir() else None

    def prepare(self, data_dir: Path, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the cache, its bytes compared with their checksums.

        Raises:
            UserError: where an image is missing, unreadable or of another size, or a folder cannot be read or written.
        """
        with searched(self.path):
            listing = list_images(self.path)
            for note in listing.notes:
                onlooker.is_warned(f"note: --dataset {self.name}: {note}")
            name = listing.fingerprint() + (f"-{self.image_size[0]}x{self.image_size[1]}" if self.image_size else "")
            place = self.path / CACHE / name
            if not _is_whole(place):  # else others may have made it, where this user may not write
                place = self._home(data_dir) / name
            if not _is_whole(place):
                with locked(place.parent, onlooker):
                    if not _is_whole(place):  # else another process made it while this one waited
                        self._make(listing, place, onlooker)
        unusable = read_json(place / ABOUT)["unusable"]
        self._check(unusable)
        if unusable:
            said = f"{len(unusable)} left out since they cannot be read: {_named(unusable)}"
            onlooker.is_warned(f"note: --dataset {self.name}: {said}")
        return place

    def _home(self, data_dir: Path) -> Path:
        """The folder of all caches of these images."""
        home = self.path / CACHE
        if os.access(home if home.exists() else self.path, os.W_OK):
            return home
        return data_dir / f"folder-{self.path.name}-{hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]}"

    def _make(self, listing: Listing, place: Path, onlooker: Onlooker) -> None:
        """Decode the images into the folder `place`, which appears when it is complete."""
        part = place.with_name(f"{place.name}.part")
        for old in (part, place):
            shutil.rmtree(old, ignore_errors=True)
        part.mkdir()
        try:
            self._decode(listing, part, onlooker)
            os.rename(part, place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
        # Caches of earlier contents. Hosts may share the data folder, with copies of the images that have other times.
        for other in place.parent.iterdir() if place.parent.name == CACHE else ():
            if other.is_dir() and not other.name.startswith(listing.fingerprint()):
                shutil.rmtree(other, ignore_errors=True)

    def _decode(self, listing: Listing, place: Path, onlooker: Onlooker) -> None:
        """Write pixels, sizes and description of the images. Raises UserError where too many cannot be used."""
        paths, shown = listing.of_part(0) + listing.of_part(1), as_text(self.path.name)
        heads = list(_on_all_cores(head, paths, Progress(f"looking at {shown}", "images", onlooker)))
        size = self.image_size or self._one_size(paths, heads)
        channels = 1 if all(one.is_grey for one in heads if one) else 3

        def pixels(path: Path) -> Pixels | str:
            try:
                found = decode(path, channels, self.image_size)
                if not self.image_size and found.shape[:2] != size:  # a tag after the pixels turns it
                    raise Unusable(path, f"{_shown(found.shape)} pixels, and the first image has {_shown(size)}")
                return found
            except Unusable as error:
                return error.text

        sizes, unusable = np.zeros((len(paths), 2), np.int32), []
        with open(place / IMAGES, "wb") as file:
            decoded = _on_all_cores(pixels, paths, Progress(f"decoding {shown}", "images", onlooker))
            for number, found in enumerate(decoded):
                if isinstance(found, str):
                    unusable.append(found)
                    if len(unusable) >= max(MOST_NAMED, self.max_unreadable + 1):
                        break
                else:
                    file.write(found.data)
                    sizes[number] = found.shape[:2]
        self._check(unusable)
        np.save(place / SIZES, sizes)
        about: dict[str, Any] = {
            "class_names": listing.classes,
            "size": (*size, channels),
            "scaled": self.image_size is not None,
            "counts": [[len(images) for images in of_part] for of_part in listing.images],
            "unusable": unusable,
            "sha256": {name: digest_of(place / name) for name in (IMAGES, SIZES)},
        }
        train, test = _parts(place, about)
        if not len(train) or not len(test):
            raise UserError(f"no image of a part can be used: {_named(unusable)}: restore them")
        about["channel_mean"], about["channel_deviation"] = channel_statistics(train.images)
        replace_text(place / ABOUT, json.dumps(about, indent=1) + "\n")

    def _one_size(self, paths: Sequence[Path], heads: Sequence[Head | None]) -> Size:
        """The size of all images. Raises UserError where they have several; it proposes one."""
        sizes = [one.size for one in heads if one]
        first = sizes[0] if sizes else (0, 0)
        pairs = zip(paths, heads, strict=True)
        other = next((f"{path} is {_shown(one.size)}" for path, one in pairs if one and one.size != first), None)
        if other is None:
            return first
        side = sorted(min(size) for size in sizes)[len(sizes) // 2]
        fitting = next((one for one in PROPOSED if one * 8 / 7 <= side), PROPOSED[-1])
        taken = sum(scaled_bytes(size, (fitting, fitting), 3) for size in sizes)
        raise UserError(
            f"--dataset {self.name}: its images have {len(set(sizes))} sizes ({other}, and the first image "
            f"{_shown(first)}): give --image-size {fitting}, for which the cache takes {taken / 1e6:,.0f} MB"
        )

    def _check(self, unusable: Sequence[str]) -> None:
        """UserError where more images than allowed cannot be used."""
        if len(unusable) > self.max_unreadable:
            raise UserError(
                f"cannot use {_named(unusable)}: restore or remove damaged images, or leave them out with "
                f"--max-unreadable {len(unusable)}" + " or more" * (len(unusable) >= MOST_NAMED)
            )

    def read(self, folder: Path) -> Dataset:
        """The set in a cache. Raises UserError where it is damaged."""
        name = as_text(self.path.name)
        name = FOLDER_DATASET + name if name in BUILT_IN_DATASETS else name  # it is not that set
        try:
            about = read_json(folder / ABOUT)
            train, test = _parts(folder, about)
            names = tuple(map(str, about["class_names"]))
            mean, deviation = (tuple(map(float, about[key])) for key in ("channel_mean", "channel_deviation"))
        except UserError:
            raise
        except Exception as error:  # a damaged description leads to errors of many kinds
            raise UserError(f"{folder} is damaged ({' '.join(str(error).split())[:200]}): remove it") from None
        return Dataset(name, train, test, len(names), mean, deviation, names)


def _is_whole(place: Path) -> bool:
    """Whether a cache has all its files, with the bytes that were written into them."""
    try:
        expected = read_json(place / ABOUT)["sha256"]
        return all(digest_of(place / name) == expected[name] for name in (IMAGES, SIZES))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _on_all_cores(function: Callable[[Path], T], paths: Sequence[Path], progress: Progress) -> Iterator[T]:
    """What a function makes of each path, in order, by threads: Pillow decodes without Python's lock."""
    progress.total = len(paths)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for first in range(0, len(paths), CHUNK):
            some = paths[first : first + CHUNK]
            yield from pool.map(function, some)
            progress.update(len(some))


def _named(unusable: Sequence[str]) -> str:
    return ", ".join(unusable[:MOST_NAMED]) + f" and {len(unusable) - MOST_NAMED} more" * (len(unusable) > MOST_NAMED)


def _shown(size: Sequence[int]) -> str:
    return f"{size[1]}x{size[0]}"


def _parts(place: Path, about: dict[str, Any]) -> tuple[Examples, Examples]:
    """The training and the test part of a cache. Raises ValueError where its files have other lengths."""
    height, width, channels = map(int, about["size"])
    sizes, file = np.load(place / SIZES), place / IMAGES
    labels = [np.repeat(np.arange(len(counts), dtype=np.int32), counts) for counts in about["counts"]]
    kept: NDArray[np.bool_] = np.asarray(sizes.any(axis=1))
    expected = int(sizes.astype(np.int64).prod(axis=1).sum()) * channels
    if len(sizes) != sum(map(len, labels)) or file.stat().st_size != expected:
        raise ValueError(f"{file.name} does not hold {kept.sum()} images of {height} x {width} x {channels}")
    images: FileImages | Pictures
    if about["scaled"]:
        digest = hashlib.sha256(repr((about["size"], sorted(about["sha256"].items()))).encode()).hexdigest()
        images = Pictures(file, sizes[kept], (height, width, channels), digest)
    else:
        images = FileImages([RecordFile(file, int(kept.sum()))], (height, width, channels), 0, planes=False)
    number = np.cumsum(kept) - 1
    count = len(labels[0])
    train, test = (
        Examples(Selected(images, number[part][kept[part]]), of_part[kept[part]])
        for part, of_part in zip((slice(count), slice(count, None)), labels, strict=True)
    )
    return train, test
