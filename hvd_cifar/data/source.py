"""The built-in data sets as a host has them: where their files are, and how they are made where there are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hvd_cifar.config import DataSettings
from hvd_cifar.data import cache, folder, synthetic
from hvd_cifar.data.cifar import CIFAR10, CIFAR100, Layout
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.download import DownloadError, fetch
from hvd_cifar.data.place import NOBODY, Onlooker, is_free, scratch_folder
from hvd_cifar.errors import UserError
from hvd_cifar.fields import FOLDER_DATASET

LAYOUTS = {layout.name: layout for layout in (CIFAR10, CIFAR100, synthetic.LAYOUT)}


@dataclass(frozen=True)
class Source:
    """A built-in data set on this host: some files in a folder.

    Attributes:
        name: what `--dataset` calls it.
        data_dir: the folder for files that are made or received.
        files: names of the files that a copy of the set needs.
        place: where files that another host sends belong, so that `locate` finds them; None: there is no such folder.
        locate: (onlooker) -> the folder of the files; None where this host has none of them. Images in folders are
            decoded here. Raises UserError where a folder cannot be searched, or an image cannot be read.
        prepare: (onlooker) -> the folder of the files, checked; they are made where there are none. Processes may call
            it together. Raises UserError where the files are damaged or cannot be made, and DownloadError.
        read: folder -> the set, its files read by index. Raises UserError where one is damaged.
    """

    name: str
    data_dir: Path
    files: tuple[str, ...]
    place: Path | None
    locate: Callable[[Onlooker], Path | None]
    prepare: Callable[[Onlooker], Path]
    read: Callable[[Path], Dataset]


def layout_of(name: str) -> Layout | None:
    """The binary layout of a named set; "auto" means CIFAR-10. None: the set has no such layout."""
    return LAYOUTS.get(CIFAR10.name if name == "auto" else name)


def source_of(settings: DataSettings, name: str = "") -> Source:
    """The built-in set that the settings name, or that of another `name`. "auto" is CIFAR-10 here.

    Raises:
        ValueError: where no built-in set has the name.
    """
    name, data_dir = name or settings.dataset, settings.data_dir
    if name.startswith(FOLDER_DATASET):
        path = Path(name.removeprefix(FOLDER_DATASET))
        images = folder.Folder(path, data_dir, settings.image_size, settings.max_unreadable)
        return Source(name, data_dir, cache.FILES, None, images.locate, images.prepare, images.read)
    layout = layout_of(name)
    if layout is None:
        raise ValueError(f"no built-in data set is called {name!r}")
    place, url = data_dir / layout.folder, settings.data_url or layout.archive

    def locate(_: Onlooker = NOBODY) -> Path | None:
        # Only CIFAR's files may be in `data_dir` itself: the synthetic set's have the same names.
        return layout.locate(place if layout is synthetic.LAYOUT else data_dir)

    def make(scratch: Path, onlooker: Onlooker) -> Path:
        return synthetic.draw(scratch, onlooker) if not layout.archive else fetch(layout, url, scratch, onlooker)

    def prepare(onlooker: Onlooker) -> Path:
        found = locate()
        if found is None:
            with scratch_folder(data_dir, onlooker) as (scratch, told):
                found = locate()  # another process may have made it while this one waited for the lock
                if found is None:
                    if not is_free(place):
                        raise UserError(
                            f"{place} is there, but has no {layout.files[0]}: move it away, or name another folder "
                            "with --data-dir"
                        )
                    os.rename(make(scratch, told), place)
                    found = place
        layout.check(found)
        return found

    return Source(layout.name, data_dir, layout.files, place, locate, prepare, layout.read)


def prepare(settings: DataSettings, onlooker: Onlooker = NOBODY) -> tuple[Source, Path]:
    """Find or make the files of the set that the settings name on this host; processes may call this together.

    Under "auto" it is CIFAR-10, and the synthetic set where CIFAR-10 is neither in the data folder nor downloadable;
    the onlooker is warned of that.

    Raises:
        UserError: where the files can be neither found nor made. Damaged files and a wrong checksum are errors under
            "auto" also: a run must not train on other data than the user meant.
    """
    source = source_of(settings)
    try:
        return source, source.prepare(onlooker)
    except DownloadError as error:
        if settings.dataset != "auto":
            raise
        onlooker.is_warned(
            "THIS IS NOT CIFAR-10: the embedded synthetic data set is used instead, and its accuracies say "
            f"nothing about CIFAR-10. Reason: {error}"
        )
    source = source_of(settings, synthetic.LAYOUT.name)
    return source, source.prepare(onlooker)
