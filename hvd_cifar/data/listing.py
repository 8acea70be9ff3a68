"""The images of a folder with a folder for each class: PATH/train/CLASS and PATH/test/CLASS, or PATH/CLASS.

Subfolders and links are followed; what begins with a dot is left out.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.data.pictures import EXTENSIONS
from hvd_cifar.errors import UserError, printable

LAYOUT = "train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg"
TRAIN_FOLDERS = ("train", "training")  # also in capitals
TEST_FOLDERS = ("test", "testing", "val", "valid", "validation")
NO_IMAGES = f"no images ({', '.join(EXTENSIONS)})"


@dataclass(frozen=True)
class Listing:
    """The images of a folder.

    Attributes:
        path: of the folder.
        classes: names, in the order of the labels.
        images: of the training and the test part, by class, in order.
        notes: what the user may not expect, a line each: what is not used, and that a test part is held out.
    """

    path: Path
    classes: tuple[str, ...]
    images: tuple[Sequence[Sequence[Path]], Sequence[Sequence[Path]]]
    notes: tuple[str, ...]

    def of_part(self, part: int) -> list[Path]:
        """All images of a part, in the order of their labels."""
        return [image for of_class in self.images[part] for image in of_class]

    def fingerprint(self) -> str:
        """Of all paths, sizes and modification times."""
        state = hashlib.sha256(b"upright, raw, sizes.npy")  # a change here makes old caches anew
        for part in range(2):
            state.update(b"part\n")
            for image in self.of_part(part):
                try:
                    found = image.stat()
                    seen = f"{found.st_size}\0{found.st_mtime_ns}"
                except OSError:
                    seen = "unreadable"  # the decoder says why
                state.update(os.fsencode(f"{image.relative_to(self.path)}\0{seen}\n"))
        return state.hexdigest()[:16]


def list_images(path: Path) -> Listing:
    """The images below a folder, by class, in the order of their names.

    Raises:
        UserError: where the folder has another layout.
        OSError: where a folder cannot be read.
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
    parts = [_part(path / folder, classes, left_out) for folder in (train, test) if folder]
    if empty := [name for name, images in zip(classes, parts[0], strict=True) if not images]:
        raise refused(f"{os.path.normpath(f'{train}/{empty[0]}')} has {NO_IMAGES}; add some, or remove it")
    if test and not any(parts[1]):
        raise refused(f"{test} has {NO_IMAGES} in folders of classes; add some")
    others = [f"{name}/ ({test}/ is used)" for name in tests[1:]]
    others += [f"{name}/" for name in inside.values() if trains and name not in (train, *tests)]
    others += [f"{count} {kind}" for kind, count in sorted(left_out.items()) if count]
    notes = [f"left out: {', '.join(others)}"] if others else []
    if not test:
        parts = _held_out(path, parts[0])
        count, rest = sum(map(len, parts[1])), sum(map(len, parts[0]))
        if not count:
            raise refused("it has no test/, and one image a class; add images, or a folder test")
        notes.append(f"it has no test/: {count} of {count + rest} images, a tenth of each class, are the test set")
    return Listing(path, tuple(map(as_text, classes)), (parts[0], parts[1]), tuple(notes))


def _folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _part(folder: Path, classes: Sequence[str], left_out: Counter[str]) -> list[list[Path]]:
    """The images of each class in a part's folder."""
    left_out["outside the folders of classes"] += sum(not entry.is_dir() for entry in folder.iterdir())
    return [sorted(images_below(folder / name, left_out)) if (folder / name).is_dir() else [] for name in classes]


def _held_out(path: Path, images: Sequence[Sequence[Path]]) -> list[list[list[Path]]]:
    """A training and a test part: a tenth of each class, chosen by a hash of the names.

    Not by the run's seed: runs of several seeds have the same test set, and so comparable accuracies; a picture that is
    added moves hardly any other.
    """
    parts: list[list[list[Path]]] = [[], []]
    for of_class in images:
        drawn = sorted(of_class, key=lambda image: hashlib.sha256(os.fsencode(image.relative_to(path))).digest())
        held = set(drawn[: min(-(-len(of_class) // 10), len(of_class) - 1)])
        for part in range(2):
            parts[part].append([image for image in of_class if (image in held) == bool(part)])
    return parts


def as_text(name: str) -> str:
    """A file's name as text that every file and terminal takes: bytes that are not UTF-8 become `\\xff`."""
    return printable(os.fsencode(name).decode("utf-8", "backslashreplace"))


def images_below(folder: Path, left_out: Counter[str] | None = None) -> Iterator[Path]:
    """The files below a folder that Pillow reads, by their extensions. Links are followed, each real folder once.

    Args:
        left_out: counts the files that are left out, by extension.

    Raises:
        OSError: where a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    kinds: Counter[str] = Counter()
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
    if left_out is not None:
        left_out.update(kinds)
