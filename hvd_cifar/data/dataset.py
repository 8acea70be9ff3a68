"""From a data set's name to its examples: find it, fetch it or draw it, then read it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from hvd_cifar.data import cifar, synthetic
from hvd_cifar.data.cifar import Examples
from hvd_cifar.data.download import DownloadError, fetch

CHUNK = 5000  # examples hashed at a time
Name = Literal["auto", "cifar10", "synthetic"]


class Prepared(NamedTuple):
    """A data set that lies ready on this host.

    name: what it is, "cifar10" or "synthetic", never "auto": to be shown wherever its results are.
    folder: where its six binary files are.
    """

    name: Literal["cifar10", "synthetic"]
    folder: Path


def prepare(
    name: Name, data_dir: Path, url: str, md5: str, *, show_progress: bool, warn: Callable[[str], None]
) -> Prepared:
    """Have the files of a data set on this host, downloaded or drawn if need be; processes may call this together.

    Args:
        name: "cifar10", "synthetic", or "auto": CIFAR-10, and synthetic only where CIFAR-10 is neither in `data_dir`
            nor downloadable.
        url, md5: of CIFAR-10's archive in its binary layout.
        show_progress: draw a progress bar on stderr.
        warn: called with one line if "auto" falls back to synthetic.

    Raises:
        UserError: also under "auto" for files that are damaged and for a wrong checksum, since a run on other data
            than was meant must not start by accident.
    """
    if name == "synthetic":
        return Prepared("synthetic", synthetic.ensure(data_dir))
    folder = cifar.locate(data_dir)
    if folder is None:
        try:
            folder = fetch(data_dir, url, md5, show_progress=show_progress)
        except DownloadError as error:
            if name == "cifar10":
                raise
            warn(
                "THIS IS NOT CIFAR-10: the embedded synthetic data set is used instead, and its accuracies say "
                f"nothing about CIFAR-10. Reason: {error}"
            )
            return Prepared("synthetic", synthetic.ensure(data_dir))
    cifar.check(folder)
    return Prepared("cifar10", folder)


def load(prepared: Prepared) -> tuple[Examples, Examples]:
    """Read the training and the test examples. Raises UserError, naming the file, if one is damaged."""
    return cifar.read(prepared.folder, "train"), cifar.read(prepared.folder, "test")


def digest_of(examples: Examples) -> str:
    """SHA-256 of images and labels: whether two hosts, or two times, have the same set by more than its name."""
    state = hashlib.sha256()
    for first in range(0, len(examples.labels), CHUNK):
        state.update(examples.images[first : first + CHUNK].tobytes())
    state.update(examples.labels.tobytes())
    return state.hexdigest()
