"""Images in folders, one for each class: PATH/train/CLASS/*.jpg and PATH/test/CLASS/*.jpg, or PATH/CLASS/*.jpg.

They are decoded once per host, into a cache of raw pixels that every rank reads by index. The cache is beside the
images, or in the data folder where that place cannot be written. It is made again when an image's name, size or
modification time differs, and when its own bytes are damaged. Subfolders and links are followed; what begins with a dot
is left out.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.data import cache
from hvd_cifar.data.cache import Listing
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pictures import EXTENSIONS, Size
from hvd_cifar.data.place import NOBODY, Onlooker, locked, searched
from hvd_cifar.errors import UserError, printable
from hvd_cifar.fields import BUILT_IN_DATASETS, FOLDER_DATASET

LAYOUT = "train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg"
TRAIN_FOLDERS = ("train", "training")  # also in capitals
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
CACHE = ".hvd_cifar-cache"


@dataclass(frozen=True)
class Folder:
    """A folder of images; see `source.Source` for its functions.

    Attributes:
        image_size: height and width of what the net sees, which images are scaled for; None: all have one size.
        max_unreadable: images that may be left out since they cannot be read.
    """

    path: Path
    data_dir: Path
    image_size: Size | None = None
    max_unreadable: int = 0

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
            told = f"hvd_cifar: note: --dataset folder:{self.path}: "
            for note in listing.notes:
                onlooker.is_warned(told + note)
            place = self._made(listing, onlooker)
        unusable = cache.unusable_of(place)
        cache.check(unusable, self.max_unreadable)
        if unusable:
            onlooker.is_warned(f"{told}{len(unusable)} left out since they cannot be read: {cache.named(unusable)}")
        return place

    def _made(self, listing: Listing, onlooker: Onlooker) -> Path:
        name = listing.fingerprint + (f"-{self.image_size[0]}x{self.image_size[1]}" if self.image_size else "")
        home = self.path / CACHE
        if cache.is_whole(home / name):
            return home / name  # also where others made it, and this user may not write
        if not os.access(home if home.exists() else self.path, os.W_OK):
            key = hashlib.sha256(os.fsencode(self.path)).hexdigest()[:8]
            home = self.data_dir / f"folder-{self.path.name}-{key}"
        place = home / name
        if not cache.is_whole(place):
            with locked(home, onlooker) as told:
                if not cache.is_whole(place):  # else another process made it while this one waited
                    shutil.rmtree(place, ignore_errors=True)
                    part = home / f"{name}.part"
                    with told.progress(f"decoding {_as_text(self.path.name)}", "images") as show:
                        cache.make(listing, part, self.image_size, self.max_unreadable, show)
                    os.rename(part, place)
                    # Hosts may share the data folder, with copies of the images that have other times.
                    if home.name == CACHE:
                        _remove_others(home, listing)
        return place

    def read(self, folder: Path) -> Dataset:
        """The set in a cache. Raises UserError where it is damaged."""
        name = _as_text(self.path.name)
        return cache.read(folder, FOLDER_DATASET + name if name in BUILT_IN_DATASETS else name)  # it is not that set


def _remove_others(home: Path, listing: Listing) -> None:
    """Remove the caches of earlier contents of the folder."""
    for old in home.iterdir():
        if old.is_dir() and not old.name.startswith(listing.fingerprint):
            shutil.rmtree(old, ignore_errors=True)


def list_images(path: Path) -> Listing:
    """The images below a folder, by class, in the order of their names.

    Raises:
        UserError: where the folder has another layout.
    """
    where = f"--dataset folder:{path}"
    if not path.is_dir():
        raise UserError(f"{where}: there is no such folder; give one with {LAYOUT}")
    inside = {name.lower(): name for name in _folders(path)}
    trains, tests = ([inside[name] for name in names if name in inside] for names in (TRAIN_FOLDERS, TEST_FOLDERS))
    if tests and not trains:
        raise UserError(f"{where}: it has a folder {tests[0]}, but no train; make it, with a folder for each class")
    train, test = trains[0] if trains else ".", tests[0] if tests else ""
    classes = _classes(path, train, test, where)
    left_out: Counter[str] = Counter()
    parts = [_part(path / folder, classes, left_out, is_train=folder == train) for folder in (train, test) if folder]
    empty = [name for name, images in zip(classes, parts[0], strict=True) if not images]
    what = f"no images ({', '.join(EXTENSIONS)})"
    if empty:
        raise UserError(f"{where}: {os.path.normpath(f'{train}/{empty[0]}')} has {what}; add some, or remove it")
    if test and not any(parts[1]):
        raise UserError(f"{where}: {test} has {what} in folders of classes; add some")
    others = [f"{name}/ ({test}/ is used)" for name in tests[1:]]
    others += [f"{name}/" for name in inside.values() if trains and name not in (train, *tests)]
    counts = [f"{count} {kind}" for kind, count in sorted(left_out.items()) if count]
    notes = [f"left out: {', '.join(others + counts)}"] if others + counts else []
    if not test:
        parts = list(_held_out(path, parts[0]))
        count, all_of_it = sum(map(len, parts[1])), sum(map(len, parts[0])) + sum(map(len, parts[1]))
        if not count:
            raise UserError(f"{where}: it has no test/, and one image a class; add images, or a folder test")
        notes.append(f"it has no test/: {count} of {all_of_it} images, a tenth of each class, are the test set")
    state = hashlib.sha256(b"upright, raw, with sizes")  # how images are decoded: a change here makes old caches anew
    for images in parts:
        state.update(b"part\n")
        for image in (image for of_class in images for image in of_class):
            state.update(os.fsencode(f"{image.relative_to(path)}\0{_state(image)}\n"))
    return Listing(path, tuple(map(_as_text, classes)), (parts[0], parts[1]), state.hexdigest()[:16], tuple(notes))


def _classes(path: Path, train: str, test: str, where: str) -> tuple[str, ...]:
    """The names of the classes. Raises UserError where they make no set."""
    classes = _folders(path / train)
    if len(classes) < 2:
        found = f"one class, {classes[0]}" if classes else "no folders of classes"
        within = f"{train} has" if train != "." else "it has"
        raise UserError(f"{where}: {within} {found}; give each class a folder, two or more: {LAYOUT}")
    if unknown := [name for name in _folders(path / test) if name not in classes] if test else []:
        raise UserError(
            f"{where}: {test}/{unknown[0]} is no class of {train}; give it images in {train}/{unknown[0]}, or remove it"
        )
    return classes


def _part(folder: Path, classes: Sequence[str], left_out: Counter[str], is_train: bool) -> list[list[Path]]:
    """The images of each class in a part's folder."""
    beside = [entry for entry in folder.iterdir() if not entry.is_dir()]
    left_out["outside the folders of classes"] += len(beside)
    present = [name if is_train or (folder / name).is_dir() else "" for name in classes]
    return [sorted(images_below(folder / name, left_out)) if name else [] for name in present]


def _held_out(path: Path, images: Sequence[Sequence[Path]]) -> tuple[list[list[Path]], list[list[Path]]]:
    """A training and a test part: a tenth of each class, chosen by a hash of the names.

    So every host and run has the same test set, and a picture that is added moves hardly any other.
    """

    def drawn(image: Path) -> str:
        return hashlib.sha256(os.fsencode(image.relative_to(path))).hexdigest()

    chosen = [
        set(sorted(of_class, key=drawn)[: min(-(-len(of_class) // 10), len(of_class) - 1)]) for of_class in images
    ]
    pairs = list(zip(images, chosen, strict=True))
    train, test = ([[i for i in of_class if (i in held) == part] for of_class, held in pairs] for part in (False, True))
    return train, test


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
