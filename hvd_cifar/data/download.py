"""Downloads of CIFAR's archives: once per host, resumed after a cut, checked, and unpacked safely."""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn, TextIO, cast

import requests
import urllib3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from hvd_cifar.data.cifar import Layout
from hvd_cifar.data.place import NOBODY, Onlooker, check_free, scratch_folder
from hvd_cifar.errors import UserError
from hvd_cifar.files import LastingStream

CHUNK_BYTES = 1 << 16
CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0  # without a new byte
TRIES = 3  # in a row that bring no new byte
RETRY_SECONDS = 1.0  # before the second try; doubled before each next one
WORTH_RETRYING = (408, 416, 429)  # of the 4xx: time-out, wrong range (of the part file), too many requests
NOT_AN_ADDRESS = (
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidURL,
    requests.exceptions.MissingSchema,
)
# Variables that requests reads.
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
CERTIFICATES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


class DownloadError(UserError):
    """The archive cannot be downloaded.

    No network, a wrong proxy or certificate file, no such host or file, a server's fault, or a time-out.
    """


def fetch(layout: Layout, data_dir: Path, url: str, md5: str, onlooker: Onlooker = NOBODY) -> Path:
    """Download the archive of a binary layout and unpack it into `data_dir`, unless it is there already.

    One process of the host downloads, and the others wait for it. The bytes of a download that was cut, by the network
    or by a kill, stay in `data_dir` as a `.part` file, and the next download continues it.

    Args:
        data_dir: made if it is absent.
        md5: of the archive, 32 hex digits; it is compared before anything is unpacked.

    Returns:
        The folder with the binary files.

    Raises:
        DownloadError: nothing usable could be downloaded.
        UserError: wrong checksum (the bad file is removed), an archive that is unsafe or of another layout (nothing of
            it is kept), an invalid address, or a folder that cannot be written.
    """
    with scratch_folder(data_dir, onlooker) as scratch:
        # Another process may have downloaded it while this one waited for the lock.
        if (found := layout.locate(data_dir)) is not None:
            return found
        target = data_dir / layout.folder
        check_free(target, layout.files[0])
        stem = PurePosixPath(layout.archive).name.removesuffix(".tar.gz")
        # With the checksum in its name, the part of one archive is never continued with another's bytes.
        archive = data_dir / f"{stem}-{md5[:8].lower()}.part"
        try:
            _obtain(layout, url, md5.lower(), archive, onlooker)
        except DownloadError as error:
            raise DownloadError(
                f"cannot download {layout.title} from {url}: {error}, or put the files into {data_dir / layout.folder}"
            ) from error
        os.rename(_unpack(layout, archive, scratch, url), target)
        for part in data_dir.glob(f"{stem}-*.part"):  # also those of other addresses
            part.unlink()
        return target


def _obtain(layout: Layout, url: str, md5: str, archive: Path, onlooker: Onlooker) -> None:
    """Download `archive`, or the rest of it, from `url`, and compare its checksum."""
    if archive.exists() and _md5(archive) == md5:
        return  # a process was killed after its download
    for _ in range(2):
        continued = _download(layout.title, url, archive, onlooker)
        actual = _md5(archive)
        if actual == md5:
            return
        archive.unlink()
        if not continued:
            break
        # The bytes from before the cut may be the wrong ones: try again from the first byte.
    raise UserError(
        f"the file from {url} has the MD5 checksum {actual} instead of {md5}, and was removed: "
        "try again, or correct --data-url or --data-md5"
    )


def _download(title: str, url: str, archive: Path, onlooker: Onlooker) -> bool:
    """Download `archive`; True if its first bytes were there before. Raises DownloadError."""
    columns = (TextColumn(title), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # Under a launcher stderr is a pipe, which rich does not take for a terminal.
    console = Console(file=cast(TextIO, LastingStream(sys.stderr)), force_terminal=True)
    with Progress(*columns, console=console, disable=not onlooker.sees_bar) as progress:
        failures, furthest = 0, _size(archive)
        while True:
            try:
                return _receive(url, archive, progress, onlooker.is_told)
            except NOT_AN_ADDRESS as error:
                raise UserError(f"cannot download from {url}: {error}: correct --data-url") from error
            except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
                failures = 1 if _size(archive) > furthest else failures + 1
                furthest = max(furthest, _size(archive))
                if failures == TRIES or not _worth_retrying(error):
                    raise _told(error) from error
                time.sleep(RETRY_SECONDS * 2 ** (failures - 1))


def _told(error: Exception, variables: tuple[str, ...] = ()) -> DownloadError:
    """The error with its remedy: those of `variables` that are set, or else network and address."""
    wrong = " or ".join(name for name in variables if os.environ.get(name))
    remedy = f"check {wrong} and --data-url" if wrong else "check the network and --data-url"
    return DownloadError(f"{_reason(error).rstrip('.')}: {remedy}")


def _request(url: str, headers: dict[str, str]) -> requests.Response:
    """The answer to a request. Raises what requests raises; DownloadError where a proxy or certificates are wrong."""
    try:
        return requests.get(url, headers=headers, stream=True, timeout=(CONNECT_SECONDS, READ_SECONDS))
    except NOT_AN_ADDRESS as error:
        of_proxy = isinstance(error, requests.exceptions.InvalidProxyURL) or "SOCKS" in str(error)
        # An error that has a request is not of `url`, which was parsed to make the request.
        if of_proxy or error.request is not None:
            raise _told(error, PROXIES) from error
        raise
    except requests.RequestException:
        raise
    except (ValueError, TypeError) as error:  # requests does not catch all errors of a malformed proxy or redirect
        raise _told(error, PROXIES) from error
    except OSError as error:
        raise _told(error, CERTIFICATES) from error


def _length(response: requests.Response) -> int | None:
    """Content-Length; None where it is absent or no number."""
    try:
        return int(response.headers["Content-Length"])
    except (KeyError, ValueError):
        return None


def _receive(url: str, archive: Path, progress: Progress, is_told: Callable[[], Any]) -> bool:
    """Request the bytes that `archive` lacks, once, and write them; True if they were added to earlier ones."""
    start = _size(archive)
    headers = {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with _request(url, headers) as response:
        if response.status_code == 416:
            archive.unlink(missing_ok=True)  # the server has no more bytes, yet these are not the whole file
        response.raise_for_status()
        if response.status_code != 206:
            start = 0  # a server that does not know Range sends the whole file
        length = _length(response)
        total = None if length is None else start + length
        task = next(iter(progress.task_ids), None)
        if task is None:
            task = progress.add_task("")
        progress.update(task, total=total, completed=start)
        with open(archive, "ab" if start else "wb") as file:
            # Raw: some servers declare a .tar.gz as gzip-encoded content, which requests would decompress.
            for chunk in response.raw.stream(CHUNK_BYTES, decode_content=False):
                file.write(chunk)
                progress.advance(task, len(chunk))
                is_told()
        if total is not None and _size(archive) < total:
            raise requests.ConnectionError(f"the connection was cut at byte {_size(archive):,} of {total:,}")
    return start > 0


def _worth_retrying(error: Exception) -> bool:
    if isinstance(error, requests.HTTPError) and error.response is not None:
        status = error.response.status_code
        return status >= 500 or status in WORTH_RETRYING
    return True


def _reason(error: Exception) -> str:
    """The last cause in one line, without the names of the classes around it."""
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"the server answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {CONNECT_SECONDS:.0f} s"
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return f"no answer for {READ_SECONDS:.0f} s"
    cause = getattr(error.args[0], "reason", error) if error.args else error
    return " ".join(str(cause).split()).rsplit("): ", 1)[-1] or type(error).__name__


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _unpack(layout: Layout, archive: Path, scratch: Path, url: str) -> Path:
    """Unpack into `scratch` and return the folder with the files. A wrong archive is removed, with a UserError."""

    def refuse(reason: str) -> NoReturn:
        archive.unlink()
        raise UserError(f"the archive from {url} was refused and removed: {reason}: give another with --data-url")

    try:
        with tarfile.open(archive, "r:gz") as tar:
            # Python's own filter, in versions that have it, in addition to the checks below.
            tar.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts:
                    refuse(f"{member.name!r} would leave the folder")
                if not (member.isreg() or member.isdir()):
                    refuse(f"{member.name!r} is a link or a device")
                # A file brings its folders. As members, some Pythons make folders for their owner alone.
                if member.isreg():
                    tar.extract(member, scratch, set_attrs=False)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        refuse(f"it is damaged or not a tar archive ({' '.join(str(error).split())})")
    folder = layout.locate(scratch)
    if folder is None:
        refuse(f"it has no {layout.files[0]}")
    if fault := layout.fault(folder):
        refuse(fault)
    return folder
