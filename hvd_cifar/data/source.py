"""The built-in data sets by name: where this host has their files, and how it makes them where it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hvd_cifar.config import DataSettings
from hvd_cifar.data import synthetic
from hvd_cifar.data.cifar import CIFAR10, CIFAR100, Layout
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.download import DownloadError, fetch
from hvd_cifar.data.folder import Folder
from hvd_cifar.data.place import NOBODY, Onlooker
from hvd_cifar.fields import FOLDER_DATASET


class Source(Protocol):
    """A built-in data set, as one host has it: some files in a folder."""

    @property
    def name(self) -> str:
        """What `--dataset` calls it."""

    @property
    def place(self) -> Path | None:
        """The folder for files that another host sends, where `locate` finds them; None: there is no such folder."""

    def locate(self, onlooker: Onlooker = NOBODY) -> Path | None:
        """The folder of the files; None where this host has none of them.

        A set of images in folders makes its cache here.

        Raises:
            UserError: where a folder cannot be searched, or the cache cannot be made.
        """

    def prepare(self, onlooker: Onlooker = NOBODY) -> Path:
        """The folder of the files, checked; they are made where there are none. Processes may call it together.

        Raises:
            UserError: where the files are damaged or cannot be made.
            DownloadError: where they cannot be downloaded.
        """

    def files(self, folder: Path) -> tuple[str, ...]:
        """Names of the files that a copy of the set needs."""

    def fault(self, folder: Path) -> str | None:
        """What is wrong with the files, by their names and lengths alone; None: nothing."""

    def read(self, folder: Path) -> Dataset:
        """The set, its files read by index. Raises UserError where one is damaged."""


@dataclass(frozen=True)
class Binary:
    """A set in one of CIFAR's binary layouts: see `Source`.

    Attributes:
        data_dir: where the folder of the files belongs.
        where: the folder that `Layout.locate` searches.
        make: called to make the files, with the onlooker; returns their folder.
    """

    layout: Layout
    data_dir: Path
    where: Path
    make: Callable[[Onlooker], Path]

    @property
    def name(self) -> str:
        """cifar10, cifar100 or synthetic."""
        return self.layout.name

    @property
    def place(self) -> Path:
        """See `Source`."""
        return self.data_dir / self.layout.folder

    def locate(self, onlooker: Onlooker = NOBODY) -> Path | None:
        """See `Source`."""
        return self.layout.locate(self.where)

    def prepare(self, onlooker: Onlooker = NOBODY) -> Path:
        """See `Source`."""
        folder = self.locate() or self.make(onlooker)
        self.layout.check(folder)
        return folder

    def files(self, folder: Path) -> tuple[str, ...]:
        """See `Source`."""
        return self.layout.files

    def fault(self, folder: Path) -> str | None:
        """See `Source`."""
        return self.layout.fault(folder)

    def read(self, folder: Path) -> Dataset:
        """See `Source`."""
        return self.layout.read(folder)


class Prepared(NamedTuple):
    """A built-in set whose files are ready on this host."""

    source: Source
    folder: Path

    def read(self) -> Dataset:
        """The set. Raises UserError where a file is damaged."""
        return self.source.read(self.folder)


def layout_of(name: str) -> Layout | None:
    """The binary layout of a named set; "auto" means CIFAR-10. None: the set has no such layout."""
    name = CIFAR10.name if name == "auto" else name
    return next((layout for layout in (CIFAR10, CIFAR100, synthetic.LAYOUT) if layout.name == name), None)


def source_of(name: str, settings: DataSettings) -> Source:
    """The built-in set of that name, in the folders that the settings name.

    Raises:
        ValueError: where there is none; "auto" names none by itself.
    """
    data_dir = settings.data_dir
    if name.startswith(FOLDER_DATASET):
        return Folder(Path(name.removeprefix(FOLDER_DATASET)), data_dir)
    layout = layout_of(name)
    if layout is None or name == "auto":
        raise ValueError(f"no built-in data set is called {name!r}")
    if layout is synthetic.LAYOUT:
        return Binary(layout, data_dir, data_dir / layout.folder, lambda onlooker: synthetic.ensure(data_dir, onlooker))
    url, md5 = settings.data_url or layout.archive, settings.data_md5 or layout.md5
    return Binary(layout, data_dir, data_dir, lambda onlooker: fetch(layout, data_dir, url, md5, onlooker))


def prepare(settings: DataSettings, warn: Callable[[str], None], onlooker: Onlooker = NOBODY) -> Prepared:
    """Find or make the files of a built-in set on this host; processes may call this together.

    Args:
        settings: `dataset` names a built-in set, or "auto": CIFAR-10, and the synthetic set where CIFAR-10 is neither
            in the data folder nor downloadable.
        warn: called with one line if "auto" falls back to the synthetic set.

    Raises:
        UserError: where the files can be neither found nor made. Damaged files and a wrong checksum are errors under
            "auto" also: a run must not train on other data than the user meant.
    """
    auto = settings.dataset == "auto"
    source = source_of(CIFAR10.name if auto else settings.dataset, settings)
    try:
        return Prepared(source, source.prepare(onlooker))
    except DownloadError as error:
        if not auto:
            raise
        warn(
            "THIS IS NOT CIFAR-10: the embedded synthetic data set is used instead, and its accuracies say "
            f"nothing about CIFAR-10. Reason: {error}"
        )
    source = source_of(synthetic.LAYOUT.name, settings)
    return Prepared(source, source.prepare(onlooker))
