"""The download, against an HTTP server of the test's own: whole, refused, wrong, and cut.

That one process makes a set for all, and what a killed one leaves, is in test_synthetic.
"""

from __future__ import annotations

import hashlib
import io
import random
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pooch
import pytest

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import cifar, host_files, source
from hvd_cifar.data.cifar import CHUNK_BYTES, CIFAR10, DownloadError
from hvd_cifar.data.host_files import NOBODY, Onlooker
from hvd_cifar.data.source import prepare
from hvd_cifar.errors import UserError

SECONDS = 60  # longer than anything here may take
PROXIES = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "no_proxy")


class Server(ThreadingHTTPServer):
    """Serves `body`; the first answers fail with these statuses, where a string is a redirect."""

    daemon_threads = True
    cut: int | None = None  # close the connection after this number of bytes of the body
    holds = False  # send nothing of the body until `release`

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body, self.asked, self.release = body, 0, threading.Event()
        self.fails: list[int | str] = []
        self.url = f"http://127.0.0.1:{self.server_port}/cifar-10-binary.tar.gz"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has gone


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.asked += 1
        if server.fails:
            failure = server.fails.pop(0)
            self.send_response(failure if isinstance(failure, int) else 302)
            self.send_header("Location", str(failure))
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(server.body)))
        self.end_headers()
        if server.holds:
            server.release.wait(SECONDS)
        self.wfile.write(server.body[: server.cut])
        self.close_connection = True


def pack(members: list[tuple[str, bytes]]) -> bytes:
    """A .tar.gz of files with these names."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


FILES = [(f"{CIFAR10.folder}/{name}", bytes(CIFAR10.bytes_of(name))) for name in CIFAR10.files]


@pytest.fixture(scope="module")
def archive() -> bytes:
    """Files of the true length, all zeros, which pack well, and a megabyte that does not, so that there is a middle."""
    return pack([(f"{CIFAR10.folder}/readme.html", random.Random(0).randbytes(1 << 20)), *FILES])


@pytest.fixture
def server(archive: bytes) -> Iterator[Server]:
    server = Server(archive)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.release.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "data"
    shutil.rmtree(tmp_path / "data", ignore_errors=True)  # pytest keeps the folders of three runs: 184 MB each


@pytest.fixture(autouse=True)
def direct_and_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pooch.core, "time", SimpleNamespace(sleep=lambda seconds: None))


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def settings(url: str, data_dir: Path, name: str = "cifar10") -> DataSettings:
    return make(DataSettings, {"dataset": name, "data_dir": data_dir, "data_url": url})


@pytest.fixture
def bring(server: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that prepares CIFAR-10, of which the server's body is the published archive."""

    def bring(onlooker: Onlooker = NOBODY) -> Path:
        layout = replace(CIFAR10, md5=md5(server.body))
        monkeypatch.setitem(source.LAYOUTS, "cifar10", layout)
        return prepare(settings(server.url, data_dir), onlooker)[1]

    return bring


def test_whole_download_then_none(
    server: Server, bring: Any, data_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_files, "SECONDS_BETWEEN_LINES", 0.0)
    signs: list[int] = []
    shown: list[str] = []
    folder = bring(Onlooker(is_told=lambda: signs.append(1), is_shown=shown.append))
    assert folder == data_dir / CIFAR10.folder
    CIFAR10.check(folder)
    assert {path.name for path in data_dir.iterdir()} <= {CIFAR10.folder, ".lock"}
    # A download on a slow line takes longer than any time-out for a hang.
    assert len(signs) >= len(server.body) // CHUNK_BYTES > 1
    pattern = r"downloading CIFAR-10: [\d,]+ of [\d,]+ bytes, [\d,]+ a second, \d+ s left"
    assert len(shown) > 10 and all(re.fullmatch(pattern, line) for line in shown)
    assert bring() == folder and server.asked == 1  # a second call finds the files, and asks nobody
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("fails", [[503], [404, "/elsewhere"]])
def test_a_failure_of_the_server_is_tried_again(server: Server, bring: Any, fails: list[int | str]) -> None:
    server.fails = fails.copy()
    assert bring().is_dir() and server.asked == 1 + len(fails)


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


def test_a_wrong_checksum_names_both_and_leaves_nothing(server: Server, data_dir: Path) -> None:
    with pytest.raises(UserError, match=f"not the archive of CIFAR-10 .*{CIFAR10.md5}.*{md5(server.body)}") as caught:
        prepare(settings(server.url, data_dir, "auto"), Onlooker(is_warned=pytest.fail))
    assert not isinstance(caught.value, DownloadError)  # so that auto does not take it for "not downloadable"
    assert "\n" not in str(caught.value) and [path.name for path in data_dir.iterdir()] in ([], [".lock"])


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("404", "404 Client Error: Not Found"),
        ("cut", "IncompleteRead"),
        ("silent", "Read timed out"),
        ("no host", "nowhere.invalid"),  # a name that no resolver may know, RFC 6761
        ("proxy that is none", "not a valid host or port"),
        ("certificates", "CA certificate"),
    ],
)
def test_what_cannot_be_downloaded_is_told_in_one_line_and_leaves_nothing(
    server: Server, data_dir: Path, fault: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "http://nowhere.invalid/x" if fault == "no host" else server.url
    server.fails = [404] * 3 if fault == "404" else []
    server.cut, server.holds = 1000 if fault == "cut" else None, fault == "silent"
    monkeypatch.setattr(cifar, "TIMEOUT", (10.0, 0.2))
    if fault == "proxy that is none":
        monkeypatch.setenv("http_proxy", "http://[")
    if fault == "certificates":
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(data_dir / "none.pem"))
        url = url.replace("http:", "https:")
    wanted = f"cannot download CIFAR-10 from {url}: .*(?i:{reason}).*: check the"
    with pytest.raises(DownloadError, match=wanted) as caught:
        prepare(settings(url, data_dir))
    assert str(data_dir / CIFAR10.folder) in str(caught.value) and "\n" not in str(caught.value)
    assert [path.name for path in data_dir.iterdir()] in ([], [".lock"])


def test_an_archive_that_lacks_a_file(server: Server, bring: Any, data_dir: Path) -> None:
    server.body = pack(FILES[1:])
    with pytest.raises(UserError, match=r"data_batch_1.bin has no length \(No such file"):
        bring()
    assert [path.name for path in data_dir.iterdir()] in ([], [".lock"])
