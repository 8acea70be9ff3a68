"""The built-in data sets by name."""

from __future__ import annotations

from pathlib import Path

from hvd_cifar.config import DataSettings
from hvd_cifar.data import synthetic
from hvd_cifar.data.cifar import CIFAR10, CIFAR100, DownloadError, Layout
from hvd_cifar.data.folder import Folder
from hvd_cifar.data.host_files import NOBODY, Onlooker
from hvd_cifar.fields import FOLDER_DATASET

LAYOUTS = {layout.name: layout for layout in (CIFAR10, CIFAR100, synthetic.LAYOUT)}
Source = Layout | Folder  # both have a name, `files`, `locate`, `prepare` and `read`


def source_of(settings: DataSettings, name: str = "") -> Source:
    """The set that the settings name, or that of another `name`. "auto" is CIFAR-10 here."""
    name = name or settings.dataset
    if name.startswith(FOLDER_DATASET):
        return Folder(Path(name.removeprefix(FOLDER_DATASET)), settings.image_size, settings.max_unreadable)
    return LAYOUTS[CIFAR10.name if name == "auto" else name]


def prepare(settings: DataSettings, onlooker: Onlooker = NOBODY) -> tuple[Source, Path]:
    """Find or make the files of the set that the settings name on this host; processes may call this together.

    Under "auto" it is CIFAR-10, and the synthetic set where CIFAR-10 is neither in the data folder nor downloadable;
    the onlooker is warned of that. Damaged files and a wrong checksum are errors under "auto" also: a run must not
    train on other data than the user meant.
    """
    source = source_of(settings)
    try:
        return source, source.prepare(settings.data_dir, onlooker)
    except DownloadError as error:
        if settings.dataset != "auto":
            raise
        onlooker.is_warned(
            "THIS IS NOT CIFAR-10: the embedded synthetic data set is used instead, and its accuracies say "
            f"nothing about CIFAR-10. Reason: {error}"
        )
    return synthetic.LAYOUT, synthetic.LAYOUT.prepare(settings.data_dir, onlooker)
