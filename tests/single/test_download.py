"""The download, against an HTTP server of the test's own: whole, wrong, and refused; who waits for it."""

from __future__ import annotations

import hashlib
import io
import random
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pooch
import pytest

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import host_files, source
from hvd_cifar.data.cifar import CHUNK_BYTES, CIFAR10, DownloadError
from hvd_cifar.data.host_files import NOBODY, Onlooker
from hvd_cifar.errors import UserError

SECONDS = 60  # longer than anything here may take
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy")


SMALL = replace(CIFAR10, train=dict.fromkeys(CIFAR10.train, 3), test=dict.fromkeys(CIFAR10.test, 2))  # examples


def _pack(path: Path, *left_out: str) -> None:
    """An archive of a small set, all zeros, and of a megabyte that takes several blocks to read."""
    contents = {name: bytes(SMALL.bytes_of(name)) for name in SMALL.files if name not in left_out}
    contents["readme.html"] = random.Random(0).randbytes(1 << 20)
    with tarfile.open(path, mode="w:gz", compresslevel=1) as tar:
        for name, content in contents.items():
            info = tarfile.TarInfo(f"{CIFAR10.folder}/{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder with archives, whole and not, and its address."""
    folder = tmp_path_factory.mktemp("served")
    _pack(folder / "whole.tar.gz")
    _pack(folder / "lacks.tar.gz", "data_batch_1.bin")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def direct_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pooch.core, "time", SimpleNamespace(sleep=lambda seconds: None))


def _prepare(url: str, data_dir: Path, name: str = "cifar10", onlooker: Onlooker = NOBODY) -> Path:
    """CIFAR-10's folder, with the archive at another address."""
    layout = replace(source.LAYOUTS["cifar10"], archive=url)
    with mock.patch.dict(source.LAYOUTS, {"cifar10": layout}):
        return source.prepare(make(DataSettings, {"dataset": name, "data_dir": data_dir}), onlooker)[1]


def _publish(archive: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make this archive CIFAR-10's own; its checksum."""
    digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setitem(source.LAYOUTS, "cifar10", replace(SMALL, md5=digest))
    return digest


def _is_empty(data_dir: Path) -> bool:
    return [path.name for path in data_dir.iterdir()] in ([], [".lock"])


def test_whole_download_then_none(
    served: tuple[Path, str], data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _publish(served[0] / "whole.tar.gz", monkeypatch)
    monkeypatch.setattr(host_files, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    signs: list[int] = []
    shown: list[str] = []
    onlooker = Onlooker(is_told=lambda: signs.append(1), is_shown=shown.append)
    folder = _prepare(f"{served[1]}/whole.tar.gz", data_dir, onlooker=onlooker)
    assert folder == data_dir / CIFAR10.folder
    SMALL.check(folder)
    assert {path.name for path in data_dir.iterdir()} <= {CIFAR10.folder, ".lock"}
    # A download on a slow line takes longer than any time-out for a hang.
    assert len(signs) >= (served[0] / "whole.tar.gz").stat().st_size // CHUNK_BYTES > 1
    pattern = r"downloading CIFAR-10: [\d,]+ of [\d,]+ bytes, [\d,]+ a second, \d+ s left"
    assert len(shown) > 10 and all(re.fullmatch(pattern, line) for line in shown)
    assert _prepare("http://nowhere.invalid/x", data_dir) == folder  # asks nobody
    assert capfd.readouterr() == ("", "")


def test_who_waits_for_another_process_says_so_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tells a watchdog that it lives."""
    monkeypatch.setattr(host_files, "SECONDS_BETWEEN_LINES", 0.01)
    signs: list[str] = []
    begun, free = threading.Event(), threading.Event()

    def make(part: Path) -> Path:
        begun.set()
        assert free.wait(SECONDS)
        return part

    def seen(line: str = "a sign of life") -> None:
        signs.append(line)
        free.set()

    place = tmp_path / "set"
    thread = threading.Thread(target=host_files.have_made, args=(place, Path.exists, make))
    thread.start()
    begun.wait(SECONDS)
    onlooker = Onlooker(is_told=seen, is_shown=seen)
    host_files.have_made(place, Path.exists, lambda _: pytest.fail("made it again"), onlooker)
    thread.join()
    waiting = f"waiting for another process, which makes files in {tmp_path}"
    assert signs[:2] == ["a sign of life", waiting] and place.is_dir()


def test_a_wrong_archive_is_named_and_leaves_nothing(
    served: tuple[Path, str], data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=f"not the archive of CIFAR-10 .*{CIFAR10.md5}") as caught:
        _prepare(f"{served[1]}/whole.tar.gz", data_dir, "auto", Onlooker(is_warned=pytest.fail))
    assert not isinstance(caught.value, DownloadError)  # so that auto does not take it for "not downloadable"
    assert "\n" not in str(caught.value) and _is_empty(data_dir)
    assert _publish(served[0] / "lacks.tar.gz", monkeypatch) not in str(caught.value)
    with pytest.raises(UserError, match=r"data_batch_1.bin has no length \(No such file"):
        _prepare(f"{served[1]}/lacks.tar.gz", data_dir)
    assert _is_empty(data_dir)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("404", "404 Client Error"),
        ("no host", "nowhere.invalid"),  # a name that no resolver may know, RFC 6761
        ("proxy that is none", "not a valid host or port"),
    ],
)
def test_what_cannot_be_downloaded_is_told_in_one_line_and_leaves_nothing(
    served: tuple[Path, str], data_dir: Path, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://nowhere.invalid/x" if fault == "no host" else f"{served[1]}/none.tar.gz"
    if fault == "proxy that is none":
        monkeypatch.setenv("http_proxy", "http://[")
    wanted = f"cannot download CIFAR-10 from {url}: .*(?i:{reason}).*: check the"
    with pytest.raises(DownloadError, match=wanted) as caught:
        _prepare(url, data_dir)
    assert f"a copy of the archive in {data_dir}" in str(caught.value) and "\n" not in str(caught.value)
    assert _is_empty(data_dir)
