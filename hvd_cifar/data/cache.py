"""The cache of a folder's images: their pixels one after the other, the size of each, and a description.

Threads make it on all cores: Pillow decodes without Python's lock. What a killed process has made is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.dataset import Dataset, Examples, Selected, channel_statistics, measured
from hvd_cifar.data.pictures import Head, Pixels, Size, Unusable, decode, head, scaled_bytes
from hvd_cifar.data.place import digest_of
from hvd_cifar.data.records import FileImages, Pictures, RecordFile
from hvd_cifar.errors import UserError
from hvd_cifar.files import read_json, replace_text

IMAGES, SIZES, ABOUT = FILES = ("images.bin", "sizes.bin", "about.json")
CHUNK = 256  # images decoded between two reports of progress
HEADS = 4096  # files of which only the heads are read, between two signs of life
MOST_NAMED = 20  # unusable images in one message
PROPOSED = (224, 192, 160, 128, 96, 64, 48, 32)  # image sizes, the largest first

Show = Callable[[int, int], None]


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        path: of the folder.
        classes: names, in the order of the labels.
        images: of the training and the test part, by class, in order.
        fingerprint: of all paths, sizes and modification times.
        notes: what the user may not expect, a line each: what is not used, and that a test part is held out.
    """

    path: Path
    classes: tuple[str, ...]
    images: tuple[Sequence[Sequence[Path]], Sequence[Sequence[Path]]]
    fingerprint: str
    notes: tuple[str, ...]

    def of_part(self, part: int) -> list[Path]:
        """All images of a part, in the order of their labels."""
        return [image for of_class in self.images[part] for image in of_class]


def is_whole(place: Path) -> bool:
    """Whether a cache has all its files, with the bytes that were written into them."""
    try:
        expected = read_json(place / ABOUT)["sha256"]
        return all(digest_of(place / name) == expected[name] for name in (IMAGES, SIZES))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def unusable_of(place: Path) -> list[str]:
    """The images that a whole cache leaves out, with the reasons."""
    return list(read_json(place / ABOUT)["unusable"])


def named(unusable: Sequence[str]) -> str:
    """Images with the reasons, up to `MOST_NAMED`."""
    return ", ".join(unusable[:MOST_NAMED]) + f" and {len(unusable) - MOST_NAMED} more" * (len(unusable) > MOST_NAMED)


def check(unusable: Sequence[str], allowed: int) -> None:
    """UserError where more images than allowed cannot be used."""
    if len(unusable) > allowed:
        raise UserError(
            f"cannot use {named(unusable)}: restore or remove damaged images, or leave them out with "
            f"--max-unreadable {len(unusable)}" + " or more" * (len(unusable) >= MOST_NAMED)
        )


def make(listing: Listing, place: Path, image_size: Size | None, allowed: int, show: Show) -> None:
    """Decode the images of a folder into the folder `place`.

    Args:
        image_size: height and width that images are scaled for; None: all must have one size.
        allowed: images that may be left out since they cannot be read.
        show: called as show(done, total).

    Raises:
        UserError: where more images cannot be used, or they have many sizes. `place` is removed then.
        OSError: where `place` cannot be written; it is removed.
    """
    paths = listing.of_part(0) + listing.of_part(1)
    place.mkdir(exist_ok=True)
    try:
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            heads: list[Head | None] = []
            for first in range(0, len(paths), HEADS):
                heads += pool.map(head, paths[first : first + HEADS])
                show(0, len(paths))
            size = image_size or _one_size(listing.path, paths, heads)
            channels = 1 if all(one.is_grey for one in heads if one) else 3

            def pixels(path: Path) -> Pixels | str:
                try:
                    found = decode(path, channels, image_size)
                    if not image_size and found.shape[:2] != size:  # a tag after the pixels turns it
                        raise Unusable(path, f"{_shown(found.shape)} pixels, and the first image has {_shown(size)}")
                    return found
                except Unusable as error:
                    return error.text

            most = max(MOST_NAMED, allowed + 1)
            unusable = _write(paths, place, channels, lambda some: pool.map(pixels, some), show, most)
        check(unusable, allowed)
        _describe(listing, place, (*size, channels), image_size is not None, unusable)
    except (OSError, UserError):
        shutil.rmtree(place)  # it would keep a full disk full
        raise


def _one_size(folder: Path, paths: Sequence[Path], heads: Sequence[Head | None]) -> Size:
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
        f"--dataset folder:{folder}: its images have {len(set(sizes))} sizes ({other}, and the "
        f"first image {_shown(first)}): give --image-size {fitting}, for which the cache takes {taken / 1e6:,.0f} MB"
    )


def _shown(size: Sequence[int]) -> str:
    return f"{size[1]}x{size[0]}"


def _write(
    paths: Sequence[Path],
    place: Path,
    channels: int,
    decoded: Callable[[Sequence[Path]], Iterable[Pixels | str]],
    show: Show,
    most: int,
) -> list[str]:
    """Write pixels and sizes of the images, from where a killed process stopped.

    Args:
        decoded: the pixels of each image, or why it cannot be used.
        most: unusable images after which this stops.

    Returns:
        The images that cannot be used, with the reasons.
    """
    with open(place / IMAGES, "ab") as file, open(place / SIZES, "ab") as index:
        sizes = _sizes(place)
        ends = sizes.astype(np.int64).prod(axis=1).cumsum() * channels
        done = int(np.searchsorted(ends, file.tell(), side="right"))  # whole images
        file.truncate(ends[done - 1] if done else 0)
        index.truncate(done * 8)
        left_out = [path for path, size in zip(paths, sizes[:done], strict=False) if not size.any()]
        unusable = [found for found in decoded(left_out) if isinstance(found, str)]
        for first in range(done, len(paths), CHUNK):
            some: list[Sequence[int]] = []
            for found in decoded(paths[first : first + CHUNK]):
                if isinstance(found, str):
                    unusable.append(found)
                    some.append((0, 0))
                else:
                    file.write(found.data)
                    some.append(found.shape[:2])
            file.flush()
            index.write(np.array(some, np.int32).tobytes())
            index.flush()
            show(first + len(some), len(paths))
            if len(unusable) >= most:
                break
    return unusable


def _sizes(place: Path) -> NDArray[np.int32]:
    """Height and width of each listed image, int32 [n, 2]; 0 and 0 where it is left out."""
    content = (place / SIZES).read_bytes()
    return np.frombuffer(content[: len(content) // 8 * 8], np.int32).reshape(-1, 2)


def _describe(
    listing: Listing, place: Path, size: tuple[int, int, int], is_scaled: bool, unusable: Sequence[str]
) -> None:
    """Write what `read` needs to know of a cache, and the checksums of its files."""
    about: dict[str, Any] = {
        "class_names": listing.classes,
        "size": size,
        "scaled": is_scaled,
        "counts": [[len(images) for images in of_part] for of_part in listing.images],
        "unusable": list(unusable),
        "sha256": {name: digest_of(place / name) for name in (IMAGES, SIZES)},
    }
    train, test = _parts(place, about)
    if not len(train) or not len(test):
        raise UserError(f"no image of a part can be used: {named(unusable)}: restore them")
    images = measured(train.images) if is_scaled else train.images
    about["channel_mean"], about["channel_deviation"] = channel_statistics(images)
    replace_text(place / ABOUT, json.dumps(about, indent=1) + "\n")


def read(place: Path, name: str) -> Dataset:
    """The set of this name in a cache. Raises UserError where it is damaged."""
    try:
        about = read_json(place / ABOUT)
        train, test = _parts(place, about)
        names = tuple(map(str, about["class_names"]))
        mean, deviation = (tuple(map(float, about[name])) for name in ("channel_mean", "channel_deviation"))
        if not len(mean) == len(deviation) == about["size"][2]:
            raise ValueError("statistics of other channels")
    except UserError:
        raise
    except Exception as error:  # a damaged description leads to errors of many kinds
        raise UserError(f"{place} is damaged ({' '.join(str(error).split())[:200]}): remove it") from None
    return Dataset(name, train, test, len(names), mean, deviation, names)


def _parts(place: Path, about: dict[str, Any]) -> tuple[Examples, Examples]:
    """The training and the test part of a cache. Raises ValueError where its files have other lengths."""
    size = height, width, channels = tuple(map(int, about["size"]))
    sizes, file = _sizes(place), place / IMAGES
    labels = [np.repeat(np.arange(len(counts), dtype=np.int32), counts) for counts in about["counts"]]
    kept: NDArray[np.bool_] = np.asarray(sizes.any(axis=1))
    expected = int(sizes.astype(np.int64).prod(axis=1).sum()) * channels
    if len(sizes) != sum(map(len, labels)) or file.stat().st_size != expected:
        raise ValueError(f"{file.name} does not hold {kept.sum()} images of {height} x {width} x {channels}")
    images: FileImages | Pictures
    if about["scaled"]:
        digest = hashlib.sha256(repr((size, sorted(about["sha256"].items()))).encode()).hexdigest()
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
