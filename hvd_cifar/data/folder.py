"""Images in folders, one for each class, and their cache.

The folder is PATH/train/CLASS and PATH/test/CLASS, or PATH/CLASS. Subfolders and links are followed; what begins with a
dot is left out. The images are decoded once per host, on all cores, into a cache of raw pixels that every rank reads by
index. The cache is beside the images, or in the data folder where that place cannot be written. It is made again when
an image's name, size or modification time differs, and when its own bytes are damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hvd_cifar.data.dataset import Dataset, Examples, FileImages, Selected, channel_statistics
from hvd_cifar.data.host_files import NOBODY, Onlooker, Progress, access, digest_of, have_made
from hvd_cifar.data.pictures import (
    EXTENSIONS,
    Head,
    Pictures,
    Pixels,
    Size,
    Unusable,
    decode,
    head,
    scaled,
    with_margin,
)
from hvd_cifar.data.pipeline import ahead
from hvd_cifar.errors import UserError, printable
from hvd_cifar.fields import BUILT_IN_DATASETS, FOLDER_DATASET
from hvd_cifar.files import read_json, replace_text

LAYOUT = "train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg"
TRAIN_FOLDERS = ("train", "training")  # also in capitals
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
NO_IMAGES = f"no images ({', '.join(EXTENSIONS)})"
CACHE = ".hvd_cifar-cache"
IMAGES, INDEX, SUMS = "images.bin", "index.npz", "sha256.json"
MOST_NAMED = 20  # unusable images in one message
PROPOSED = (224, 192, 160, 128, 96, 64, 48, 32)  # image sizes, the largest first

T = TypeVar("T")


class Listed(NamedTuple):
    """An image of a folder."""

    path: Path
    label: int
    is_test: bool


@dataclass(frozen=True)
class Listing:
    """The images of a folder."""

    path: Path
    classes: tuple[str, ...]  # names, in the order of the labels
    images: Sequence[Listed]  # the training part, then the test part, each by class
    notes: tuple[str, ...]  # what the user may not expect: what is not used, and that a test part is held out

    @cached_property
    def fingerprint(self) -> str:
        """Of all paths, sizes and modification times."""
        state = hashlib.sha256(b"upright, raw, index.npz")  # a change here makes old caches anew
        for image in self.images:
            try:
                found = image.path.stat()
                seen = f"{found.st_size}\0{found.st_mtime_ns}"
            except OSError:
                seen = "unreadable"  # the decoder says why
            state.update(os.fsencode(f"{image.path.relative_to(self.path)}\0{seen}\n"))
        return state.hexdigest()[:16]


def list_images(path: Path) -> Listing:
    """The images below a folder, by class, in the order of their names.

    Raises UserError where the folder has another layout, OSError where a folder cannot be read.
    """

    def refused(what: str) -> UserError:
        return UserError(f"--dataset folder:{path}: {what}")

    if not path.is_dir():
        raise refused(f"there is no such folder; give one with {LAYOUT}")
    inside = {name.lower(): name for name in _folders(path)}
    trains, tests = ([inside[name] for name in names if name in inside] for names in (TRAIN_FOLDERS, TEST_FOLDERS))
    if tests and not trains:
        raise refused(f"it has a folder {tests[0]}, but no train; make it, with a folder for each class")
    train, test = trains[0] if trains else ".", tests[0] if tests else ""
    classes = _folders(path / train)
    if len(classes) < 2:
        found = f"one class, {classes[0]}" if classes else "no folders of classes"
        raise refused(
            f"{f'{train} has' if trains else 'it has'} {found}; give each class a folder, two or more: {LAYOUT}"
        )
    if unknown := [name for name in _folders(path / test) if name not in classes] if test else []:
        raise refused(
            f"{test}/{unknown[0]} is no class of {train}; give it images in {train}/{unknown[0]}, or remove it"
        )
    left_out: Counter[str] = Counter()
    images = [
        Listed(image, label, is_test)
        for is_test, folder in ((False, train), (True, test))
        if folder
        for label, name in enumerate(classes)
        for image in sorted(images_below(path / folder / name, left_out))
    ]
    filled = {image.label for image in images if not image.is_test}
    if empty := [name for label, name in enumerate(classes) if label not in filled]:
        raise refused(f"{os.path.normpath(f'{train}/{empty[0]}')} has {NO_IMAGES}; add some, or remove it")
    if test and not images[-1].is_test:
        raise refused(f"{test} has {NO_IMAGES} in folders of classes; add some")
    for folder in filter(None, (train, test)):
        left_out["outside the folders of classes"] += sum(not entry.is_dir() for entry in (path / folder).iterdir())
    others = [f"{name}/ ({test}/ is used)" for name in tests[1:]]
    others += [f"{name}/" for name in inside.values() if trains and name not in (train, *tests)]
    others += [f"{count} {kind}" for kind, count in sorted(left_out.items()) if count]
    notes = [f"left out: {', '.join(others)}"] if others else []
    if not test:
        images = _held_out(path, images)
        count = sum(image.is_test for image in images)
        if not count:
            raise refused("it has no test/, and one image a class; add images, or a folder test")
        notes.append(f"it has no test/: {count} of {len(images)} images, a tenth of each class, are the test set")
    return Listing(path, tuple(map(as_text, classes)), images, tuple(notes))


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _held_out(path: Path, images: Sequence[Listed]) -> list[Listed]:
    """A tenth of each class as the test part, chosen by a hash of the names.

    Not by the run's seed: runs of several seeds have the same test set, and so comparable accuracies; a picture that is
    added moves hardly any other.
    """
    held: set[Path] = set()
    for _, group in groupby(images, lambda image: image.label):
        paths = [image.path for image in group]
        paths.sort(key=lambda image: hashlib.sha256(os.fsencode(image.relative_to(path))).digest())
        held.update(paths[: min(-(-len(paths) // 10), len(paths) - 1)])
    return sorted((image._replace(is_test=image.path in held) for image in images), key=lambda image: image.is_test)


def as_text(name: str) -> str:
    """A file's name as text that every file and terminal takes: bytes that are not UTF-8 become `\\xff`."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def images_below(folder: Path, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """The files below a folder that Pillow reads, by their extensions. Links are followed, each real folder once.

    `left_out` counts the other files by extension. Raises OSError where a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        if error.filename != str(folder) or os.path.lexists(folder):  # a class may have no test images
            raise error

    kinds = Counter() if left_out is None else left_out
    seen: set[str] = set()
    for root, folders, files in os.walk(folder, followlinks=True, onerror=fail):
        is_new = os.path.realpath(root) not in seen
        seen.add(os.path.realpath(root))
        kinds["hidden"] += sum(name.startswith(".") for name in folders)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        for name in files if is_new else ():
            if name.startswith("."):
                kinds["hidden"] += 1
            elif name.lower().endswith(EXTENSIONS):
                yield Path(root, name)
            else:
                kinds[printable(Path(name).suffix.lower() or "without an extension")] += 1


@dataclass(frozen=True)
class Folder:
    """A folder of images, a `source.Source`."""

    path: Path
    image_size: Size | None = None  # of what the net sees, which images are scaled for; None: all have one size
    max_unreadable: int = 0  # images that may be left out since they cannot be read
    files = (IMAGES, INDEX, SUMS)

    @property
    def name(self) -> str:
        """What `--dataset` calls it."""
        return f"{FOLDER_DATASET}{self.path}"

    def locate(self, data_dir: Path, onlooker: Onlooker = NOBODY) -> Path | None:
        """The folder of the cache, made if need be; None where there are no images. Raises UserError as `prepare`."""
        with access("read", self.path):
            return self.prepare(data_dir, onlooker) if self.path.is_dir() else None

    def prepare(self, data_dir: Path, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the cache, its bytes compared with their checksums.

        Raises UserError where an image is unreadable or of another size, or a folder cannot be read or written.
        """
        with access("read", self.path):
            listing = list_images(self.path)
            for note in listing.notes:
                onlooker.is_warned(f"note: --dataset {self.name}: {note}")
            name = listing.fingerprint + (f"-{self.image_size[0]}x{self.image_size[1]}" if self.image_size else "")
            place = self.path / CACHE / name
            if not _is_whole(place):  # else others may have made it, where this user may not write
                place = self._home(data_dir) / name
                have_made(place, _is_whole, lambda part: self._make(listing, place, part, onlooker), onlooker)
        _, unusable = _read(place)
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

    def _make(self, listing: Listing, place: Path, part: Path, onlooker: Onlooker) -> Path:
        """Decode the images into the folder `part`, which becomes `place`."""
        # Hosts may share the data folder, with copies of the images that have other times.
        is_beside = place.parent.name == CACHE
        for other in place.parent.iterdir():  # caches of earlier contents, and a damaged one
            if other == place or (is_beside and other.is_dir() and listing.fingerprint not in other.name):
                shutil.rmtree(other, ignore_errors=True)
        self._decode(listing, part, onlooker)
        replace_text(part / SUMS, json.dumps({name: digest_of(part / name) for name in (IMAGES, INDEX)}) + "\n")
        return part

    def _decode(self, listing: Listing, place: Path, onlooker: Onlooker) -> None:
        """Write pixels and index of the images. Raises UserError where too many cannot be used."""
        paths, shown = [image.path for image in listing.images], as_text(self.path.name)
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

        kept, sizes, unusable = [], [], []
        with open(place / IMAGES, "wb") as file:
            decoded = _on_all_cores(pixels, paths, Progress(f"decoding {shown}", "images", onlooker))
            for image, found in zip(listing.images, decoded, strict=True):
                if isinstance(found, str):
                    unusable.append(found)
                    if len(unusable) >= max(MOST_NAMED, self.max_unreadable + 1):
                        break
                else:
                    file.write(found.data)
                    kept.append(image)
                    sizes.append(found.shape[:2])
        self._check(unusable)
        about: dict[str, Any] = {
            "class_names": listing.classes,
            "size": (*size, channels),
            "sha256": digest_of(place / IMAGES) if self.image_size else "",
            "unusable": unusable,
        }
        columns = {
            "sizes": np.array(sizes, np.int32),
            "labels": np.array([image.label for image in kept], np.int32),
            "is_test": np.array([image.is_test for image in kept]),
        }
        train, test = _parts(place, about, **columns)
        if not len(train) or not len(test):
            raise UserError(f"no image of a part can be used: {_named(unusable)}: restore them")
        about["channel_mean"], about["channel_deviation"] = channel_statistics(train.images)
        np.savez(place / INDEX, about=np.array(json.dumps(about)), allow_pickle=False, **columns)

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
        spans = (scaled(size, with_margin((fitting, fitting))) for size in sizes)
        taken = sum(3 * rows.length * columns.length for rows, columns in spans)
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
        """The set in a whole cache. Raises UserError where a file of it cannot be opened."""
        name = as_text(self.path.name)
        dataset, _ = _read(folder)
        return replace(dataset, name=FOLDER_DATASET + name if name in BUILT_IN_DATASETS else name)  # it is not that set


def _read(place: Path) -> tuple[Dataset, list[str]]:
    """The set in a whole cache, and the images that could not be used."""
    with np.load(place / INDEX) as index:
        about, columns = json.loads(str(index["about"])), {name: index[name] for name in ("sizes", "labels", "is_test")}
    names = tuple(about["class_names"])
    statistics = tuple(about["channel_mean"]), tuple(about["channel_deviation"])
    return Dataset(place.name, *_parts(place, about, **columns), len(names), *statistics, names), about["unusable"]


def _parts(place: Path, about: dict[str, Any], sizes: Any, labels: Any, is_test: Any) -> tuple[Examples, Examples]:
    """The training and the test part of a cache."""
    images: FileImages | Pictures
    if about["sha256"]:
        digest = hashlib.sha256(f"{about['sha256']} {tuple(about['size'])}".encode() + sizes.tobytes()).hexdigest()
        images = Pictures(place / IMAGES, sizes, tuple(about["size"]), digest)
    else:
        images = FileImages({place / IMAGES: len(sizes)}, tuple(about["size"]))
    train, test = (np.flatnonzero(is_test == part) for part in (False, True))
    return Examples(Selected(images, train), labels[train]), Examples(Selected(images, test), labels[test])


def _is_whole(place: Path) -> bool:
    """Whether a cache has all its files, with the bytes that were written into them."""
    try:
        expected = read_json(place / SUMS)
        return all(digest_of(place / name) == expected[name] for name in (IMAGES, INDEX))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _on_all_cores(function: Callable[[Path], T], paths: Sequence[Path], progress: Progress) -> Iterator[T]:
    """What a function makes of each path, in order, by threads: Pillow decodes without Python's lock."""
    progress.total = len(paths)
    for found in ahead(function, paths, len(os.sched_getaffinity(0))):
        yield found
        progress.update(1)


def _named(unusable: Sequence[str]) -> str:
    return ", ".join(unusable[:MOST_NAMED]) + f" and {len(unusable) - MOST_NAMED} more" * (len(unusable) > MOST_NAMED)


def _shown(size: Sequence[int]) -> str:
    return f"{size[1]}x{size[0]}"
