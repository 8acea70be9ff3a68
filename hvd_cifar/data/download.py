"""Downloads of CIFAR's archives, checked by their published checksum."""

from __future__ import annotations

import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import pooch
from rich.progress import DownloadColumn, TransferSpeedColumn

from hvd_cifar.data.cifar import Layout
from hvd_cifar.data.place import Onlooker
from hvd_cifar.errors import UserError

CHUNK_BYTES = 1 << 16
TIMEOUT = (10.0, 60.0)  # seconds: to connect, and without a new byte
WAITS = (1.0, 2.0)  # seconds before another try


class DownloadError(UserError):
    """The archive cannot be downloaded: no network, no such host or file, a server's fault, or a time-out."""


class _Bar:
    """A progress bar as pooch uses one: it sets `total`, and calls the methods."""

    def __init__(self, show: Callable[[int, int], None]) -> None:
        self.total, self.done, self._show = 0, 0, show

    def update(self, received: int) -> None:
        """So many bytes more have been received."""
        self.done += received
        self._show(min(self.done, self.total), self.total)

    def reset(self) -> None:
        """The download is complete."""
        self.done = 0

    def close(self) -> None:
        """Nothing more comes."""


def fetch(layout: Layout, url: str, scratch: Path, onlooker: Onlooker) -> Path:
    """Download the archive of a binary layout into the folder `scratch`, and unpack it there.

    Returns:
        The folder with the binary files.

    Raises:
        DownloadError: it could not be downloaded.
        UserError: it is another file than its authors published, or lacks files.
        OSError: `scratch` cannot be written.
    """
    pooch.get_logger().setLevel("ERROR")
    with onlooker.progress(layout.title, "bytes", DownloadColumn(), TransferSpeedColumn()) as show:
        for wait in (*WAITS, None):
            try:
                archive = _download(layout, url, scratch, show)
                break
            except DownloadError as error:
                if wait is None:
                    raise DownloadError(
                        f"cannot download {layout.title} from {url}: {error}: check the network, the variables of its "
                        f"proxy, and --data-url, or put the files into {scratch.parent / layout.folder}"
                    ) from error
                time.sleep(wait)
    folder = scratch / layout.folder
    folder.mkdir()
    with tarfile.open(archive, "r:gz") as tar:
        for member in tar:
            # No path of the archive is used: whatever else is in it, only these files are written.
            name = PurePosixPath(member.name).name
            if name in (*layout.files, layout.names_file) and member.isreg() and (packed := tar.extractfile(member)):
                with packed, open(folder / name, "wb") as file:
                    shutil.copyfileobj(packed, file)
    layout.check(folder)
    return folder


def _download(layout: Layout, url: str, scratch: Path, show: Callable[[int, int], None]) -> str:
    """The path of the downloaded archive."""
    # Not compressed once more: the checksum is that of the file itself.
    headers = {"Accept-Encoding": "identity"}
    get = pooch.HTTPDownloader(progressbar=_Bar(show), chunk_size=CHUNK_BYTES, timeout=TIMEOUT, headers=headers)

    def download(address: str, file: str, _: Any) -> None:
        try:
            get(address, file, None)
        except (OSError, ValueError, TypeError) as error:  # the last two: a malformed proxy, or a redirect
            if getattr(error, "errno", None):
                raise  # the disk's: requests' own errors are OSErrors without a number
            raise DownloadError(_reason(error)) from error

    try:
        return str(pooch.retrieve(url, f"md5:{layout.md5}", "archive.tar.gz", scratch, downloader=download))
    except ValueError as error:  # pooch's, which names both checksums
        raise UserError(
            f"the file from {url} is not the archive of {layout.title} ({str(error).partition('. ')[0]}): try again, "
            "or correct --data-url"
        ) from error


def _reason(error: Exception) -> str:
    """The last cause in one line, without the names of the classes around it."""
    cause = getattr(error.args[0], "reason", error) if error.args else error
    return " ".join(str(cause).split()).rsplit("): ", 1)[-1].rstrip(".\"')") or type(error).__name__
