"""The download, against an HTTP server of the test's own: whole, cut, killed, refused, wrong, and unsafe."""

from __future__ import annotations

import hashlib
import io
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from filelock import FileLock

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import download, place
from hvd_cifar.data.cifar import CIFAR10, CIFAR100
from hvd_cifar.data.download import CHUNK_BYTES, DownloadError
from hvd_cifar.data.place import Onlooker
from hvd_cifar.data.source import prepare
from hvd_cifar.errors import UserError

ROOT = Path(__file__).parents[2]  # where the package can be imported from
SECONDS = 60  # longer than anything here may take


class Answer(NamedTuple):
    """How the server treats one request."""

    status: int = 200
    ranges: bool = True  # honour a Range header
    shift: int = 0  # send bytes this much later in the file than asked for
    cut: int | None = None  # close the connection after this number of bytes of the body
    hold: int | None = None  # after this number of bytes of the body, wait for `release`
    length: str | None = None  # Content-Length; None: the true one
    to: str | None = None  # Location, for a status of 3xx


class Server(ThreadingHTTPServer):
    """Serves `body`, by one answer after the other, the last one for all further requests; keeps what was asked."""

    daemon_threads = True

    def __init__(self, body: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.body = body
        self.answers = [Answer()]
        self.asked: list[str | None] = []  # the Range header of each request
        self.release = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/cifar-10-binary.tar.gz"

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that was killed


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        server, asked = self.server, self.headers["Range"]
        answer = server.answers[min(len(server.asked), len(server.answers) - 1)]
        server.asked.append(asked)
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and answer.ranges else 0
        start += answer.shift
        body = server.body[start:]
        if start and not body:
            answer = Answer(status=416)
        if answer.status != 200:
            self.send_response(answer.status)
            self.send_header("Content-Length", "0")
            if answer.to is not None:
                self.send_header("Location", answer.to)
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(server.body) - 1}/{len(server.body)}")
        self.send_header("Content-Length", answer.length or str(len(body)))
        self.end_headers()
        if answer.hold is not None:
            self.wfile.write(body[: answer.hold])
            server.release.wait(SECONDS)
            body = body[answer.hold :]
        self.wfile.write(body[: answer.cut])
        self.close_connection = True


def pack(members: list[tuple[str | tarfile.TarInfo, bytes]]) -> bytes:
    """A .tar.gz of these members; a plain name is a regular file."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz", compresslevel=1) as tar:
        for member, content in members:
            info = member if isinstance(member, tarfile.TarInfo) else tarfile.TarInfo(member)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return file.getvalue()


def special(name: str, kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.fixture(scope="module")
def archive() -> bytes:
    """Files of the true length, all zeros, which pack well, and a megabyte that does not, so that there is a middle."""
    files = [(f"{CIFAR10.folder}/{name}", bytes(CIFAR10.bytes_of(name))) for name in CIFAR10.files]
    ballast = (f"{CIFAR10.folder}/readme.html", random.Random(0).randbytes(1 << 20))
    return pack([ballast, *files])


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
    for name in (*download.PROXIES, *download.CERTIFICATES, "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "RETRY_SECONDS", 0.01)


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def bring(server: Server, data_dir: Path) -> Path:
    return download.fetch(CIFAR10, data_dir, server.url, md5(server.body))


def part_of(server: Server, data_dir: Path) -> Path:
    return data_dir / f"cifar-10-binary-{md5(server.body)[:8]}.part"


def assert_complete(folder: Path, data_dir: Path) -> None:
    """The data set is in place, and nothing else is left but the lock."""
    assert folder == data_dir / CIFAR10.folder
    CIFAR10.check(folder)
    assert {path.name for path in data_dir.iterdir()} <= {CIFAR10.folder, ".lock"}


def assert_nothing(data_dir: Path) -> None:
    assert {path.name for path in data_dir.iterdir()} <= {".lock"}


def start_fetch(server: Server, data_dir: Path) -> subprocess.Popen[str]:
    """A process that says "ready", downloads, and prints the folder."""
    program = (
        "import sys; from pathlib import Path; from hvd_cifar.data.cifar import CIFAR10\n"
        "from hvd_cifar.data.download import fetch; print('ready', flush=True)\n"
        "print(fetch(CIFAR10, Path(sys.argv[1]), sys.argv[2], sys.argv[3]))"
    )
    command = [sys.executable, "-c", program, str(data_dir), server.url, md5(server.body)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def test_whole_download_then_none(server: Server, data_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked == [None]
    assert capfd.readouterr() == ("", "")
    # A second call finds the files, and asks nobody.
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked == [None]


def test_others_may_read_the_folder_also_with_a_python_without_filters(
    server: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    folder = tarfile.TarInfo(CIFAR10.folder)
    folder.type, folder.mode = tarfile.DIRTYPE, 0o755
    server.body = pack([(folder, b""), *((f"{CIFAR10.folder}/{n}", bytes(CIFAR10.bytes_of(n))) for n in CIFAR10.files)])
    assert bring(server, data_dir).stat().st_mode & 0o055 == 0o055


def test_progress_is_drawn_on_stderr_when_asked_for(
    server: Server, data_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server.body = server.body[:-100]  # a damaged archive is enough
    with pytest.raises(UserError):
        download.fetch(CIFAR10, data_dir, server.url, md5(server.body), Onlooker(sees_bar=True))
    out, err = capfd.readouterr()
    assert out == "" and "CIFAR-10" in err


def test_a_cut_download_goes_on_where_it_stopped(server: Server, data_dir: Path) -> None:
    cut = len(server.body) // 2
    server.answers = [Answer(cut=cut), Answer(cut=0), Answer()]
    assert_complete(bring(server, data_dir), data_dir)
    first, second, third = server.asked
    assert first is None and second == third and second is not None
    start = int(second.removeprefix("bytes=").removesuffix("-"))
    assert cut - CHUNK_BYTES < start <= cut  # at most the chunk that was on its way is asked for again


def test_each_cut_that_brings_bytes_is_forgiven(server: Server, data_dir: Path) -> None:
    pieces = 2 * download.TRIES
    server.answers = [Answer(cut=len(server.body) // pieces)] * (pieces + 2)
    assert_complete(bring(server, data_dir), data_dir)
    assert len(server.asked) > download.TRIES


def test_the_next_call_goes_on_after_one_that_gave_up(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(cut=len(server.body) // 2), Answer(cut=0)]
    with pytest.raises(DownloadError, match="cannot download"):
        bring(server, data_dir)
    assert len(server.asked) == download.TRIES
    got = part_of(server, data_dir).stat().st_size
    assert got > 0
    server.answers = [Answer()]
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked[-1] == f"bytes={got}-"


def test_a_killed_download_is_resumed(server: Server, data_dir: Path) -> None:
    half = len(server.body) // 2
    server.answers = [Answer(hold=half), Answer()]
    process = start_fetch(server, data_dir)
    part = part_of(server, data_dir)
    wait_until(lambda: part.exists() and part.stat().st_size > half - 4 * CHUNK_BYTES)
    process.send_signal(signal.SIGKILL)
    assert process.wait(SECONDS) == -signal.SIGKILL
    got = part.stat().st_size

    assert_complete(bring(server, data_dir), data_dir)  # the lock of the dead is free, and what it left is gone
    assert server.asked == [None, f"bytes={got}-"]


def test_killed_while_unpacking(server: Server, data_dir: Path) -> None:
    """Neither is anything downloaded again, nor does a half-unpacked file count."""
    half_done = data_dir / ".unfinished" / CIFAR10.folder
    half_done.mkdir(parents=True)
    (half_done / "old.bin").write_bytes(b"half")
    part_of(server, data_dir).write_bytes(server.body)
    folder = bring(server, data_dir)
    assert_complete(folder, data_dir)
    assert server.asked == []
    assert not (folder / "old.bin").exists()


def test_two_processes_download_once(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(hold=1000)]
    processes = [start_fetch(server, data_dir) for _ in range(2)]
    time.sleep(0.5)  # for the second to come to the lock, or, without one, to the server
    server.release.set()
    for process in processes:
        out, _ = process.communicate(timeout=SECONDS)
        assert (process.returncode, out) == (0, f"{data_dir / CIFAR10.folder}\n")
    assert server.asked == [None]
    assert_complete(data_dir / CIFAR10.folder, data_dir)


def test_a_watchdog_is_told_of_every_piece(server: Server, data_dir: Path) -> None:
    """A download on a slow line takes longer than any time-out for a hang."""
    signs: list[int] = []
    onlooker = Onlooker(is_told=lambda: signs.append(download._size(part_of(server, data_dir))))
    download.fetch(CIFAR10, data_dir, server.url, md5(server.body), onlooker)
    assert len(signs) >= len(server.body) // CHUNK_BYTES > 1


@pytest.mark.parametrize("works", [True, False])
def test_a_watchdog_is_told_while_the_holder_of_the_lock_works(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not where the holder is stopped."""
    monkeypatch.setattr(place, "SECONDS_BETWEEN_LOOKS", 0.01)
    signs: list[None] = []
    holder = FileLock(tmp_path / place.LOCK, thread_local=False)
    holder.acquire()

    def hold() -> None:
        for number in range(1000 if works else 10):
            if works:
                (tmp_path / "archive.part").write_text(str(number))
            if len(signs) == 3:
                break
            time.sleep(0.02)
        holder.release()

    thread = threading.Thread(target=hold)
    thread.start()
    with place.locked(tmp_path, Onlooker(is_told=lambda: signs.append(None))):
        assert (len(signs) >= 3) == works and (works or not signs)
    thread.join()


def test_a_server_without_range_sends_all_again(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(cut=len(server.body) // 2), Answer(ranges=False)]
    assert_complete(bring(server, data_dir), data_dir)
    first, second = server.asked
    assert first is None and second is not None


def test_a_server_that_sends_another_range_is_asked_for_all(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(cut=len(server.body) // 2), Answer(shift=100), Answer()]
    assert_complete(bring(server, data_dir), data_dir)
    first, second, third = server.asked
    assert first is None and second is not None and third is None


def test_a_part_that_is_too_long_starts_from_zero(server: Server, data_dir: Path) -> None:
    data_dir.mkdir()
    part_of(server, data_dir).write_bytes(server.body + b"more")
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked == [f"bytes={len(server.body) + 4}-", None]


def test_a_part_with_wrong_bytes_starts_from_zero_once(server: Server, data_dir: Path) -> None:
    data_dir.mkdir()
    part_of(server, data_dir).write_bytes(b"wrong")
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked == ["bytes=5-", None]


def test_the_part_of_another_archive_is_not_continued(server: Server, data_dir: Path) -> None:
    data_dir.mkdir()
    (data_dir / "cifar-10-binary-00000000.part").write_bytes(b"another's")
    assert_complete(bring(server, data_dir), data_dir)
    assert server.asked == [None]


@pytest.mark.parametrize("name", ["auto", "cifar10"])
def test_a_wrong_checksum_names_both_and_removes_the_file(server: Server, data_dir: Path, name: str) -> None:
    expected = "0123456789abcdef" * 2
    given = {"dataset": name, "data_dir": data_dir, "data_url": server.url, "data_md5": expected}
    with pytest.raises(UserError, match=f"{md5(server.body)} instead of {expected}") as caught:
        prepare(make(DataSettings, given), warn=pytest.fail)
    assert not isinstance(caught.value, DownloadError)  # so that auto does not take it for "not downloadable"
    assert server.asked == [None]
    assert_nothing(data_dir)


def test_the_checksum_may_be_written_in_capitals(server: Server, data_dir: Path) -> None:
    folder = download.fetch(CIFAR10, data_dir, server.url, md5(server.body).upper())
    assert_complete(folder, data_dir)


@pytest.mark.parametrize("status, requests", [(404, 1), (403, 1), (500, download.TRIES), (503, download.TRIES)])
def test_an_http_error_is_a_download_error(server: Server, data_dir: Path, status: int, requests: int) -> None:
    server.answers = [Answer(status=status)]
    with pytest.raises(DownloadError, match=f"{re.escape(server.url)}: the server answered {status}") as caught:
        bring(server, data_dir)
    assert "\n" not in str(caught.value)
    assert len(server.asked) == requests
    assert_nothing(data_dir)


def test_a_server_that_fails_once_is_asked_again(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(status=503), Answer()]
    assert_complete(bring(server, data_dir), data_dir)


@pytest.mark.parametrize("length", ["abc", "SIZE, SIZE", "9" * 5000])
def test_a_length_that_is_no_number_is_not_used(server: Server, data_dir: Path, length: str) -> None:
    server.answers = [Answer(length=length.replace("SIZE", str(len(server.body))))]
    assert_complete(bring(server, data_dir), data_dir)


def test_a_redirect_to_no_address_is_a_download_error(server: Server, data_dir: Path) -> None:
    server.answers = [Answer(status=302, to="http://[::1")]
    with pytest.raises(DownloadError, match=r"Invalid IPv6 URL: check the network and --data-url, or put"):
        bring(server, data_dir)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("REQUESTS_CA_BUNDLE", __file__ + ".none"),
        ("HTTPS_PROXY", "socks5://127.0.0.1:1"),
        ("HTTPS_PROXY", "http://"),
        ("https_proxy", "http://me:secret@127.0.0.1:x"),
        ("ALL_PROXY", "http://me:secret@"),
    ],
)
def test_a_wrong_variable_is_named(data_dir: Path, variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY")
    monkeypatch.setenv(variable, value)
    # A DownloadError, so that auto takes the embedded set.
    with pytest.raises(DownloadError, match=f": check {variable} and --data-url, or put the files into") as caught:
        download.fetch(CIFAR10, data_dir, "https://127.0.0.1:1/x.tar.gz", "0" * 32)
    assert "\n" not in str(caught.value) and "secret" not in str(caught.value)
    assert_nothing(data_dir)


def test_nobody_listening(data_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/x.tar.gz"
    with pytest.raises(DownloadError, match=r"Connection refused: check the network") as caught:
        download.fetch(CIFAR10, data_dir, url, "0" * 32)
    assert "\n" not in str(caught.value)


def test_no_such_host(data_dir: Path) -> None:
    with pytest.raises(DownloadError, match="nowhere.invalid"):  # a name that no resolver may know, RFC 6761
        download.fetch(CIFAR10, data_dir, "http://nowhere.invalid/x.tar.gz", "0" * 32)


def test_a_server_that_falls_silent(server: Server, data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "READ_SECONDS", 0.1)
    server.answers = [Answer(hold=1000)]
    with pytest.raises(DownloadError, match="no answer for"):
        bring(server, data_dir)
    assert len(server.asked) >= download.TRIES


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/x", "example.org/x", "http://"])
def test_an_address_that_is_none_is_not_a_network_problem(data_dir: Path, url: str) -> None:
    with pytest.raises(UserError, match="correct --data-url") as caught:
        download.fetch(CIFAR10, data_dir, url, "0" * 32)
    assert not isinstance(caught.value, DownloadError)


@pytest.mark.parametrize(
    "member, reason",
    [
        ("../outside", "would leave the folder"),
        (f"{CIFAR10.folder}/../../outside", "would leave the folder"),
        ("ABSOLUTE", "would leave the folder"),
        (special("inside", tarfile.SYMTYPE, "/etc/passwd"), "is a link or a device"),
        (special("inside", tarfile.SYMTYPE, "data_batch_1.bin"), "is a link or a device"),
        (special("inside", tarfile.LNKTYPE, "good.txt"), "is a link or a device"),
        (special("inside", tarfile.FIFOTYPE), "is a link or a device"),
        (special("inside", tarfile.CHRTYPE), "is a link or a device"),
    ],
    ids=["parent", "parent-inside", "absolute", "symlink-out", "symlink-in", "hard-link", "fifo", "device"],
)
def test_an_unsafe_archive_is_refused_whole(
    server: Server, data_dir: Path, member: str | tarfile.TarInfo, reason: str
) -> None:
    outside = data_dir.parent / "outside"
    if member == "ABSOLUTE":
        member = str(outside)
    server.body = pack([("good.txt", b"good"), (member, b"")])
    with pytest.raises(UserError, match=reason) as caught:
        bring(server, data_dir)
    assert not isinstance(caught.value, DownloadError)
    assert_nothing(data_dir)
    assert not outside.exists()


@pytest.mark.parametrize("damage", ["cut", "not gzip", "not tar", "empty"])
def test_a_damaged_archive_is_refused(server: Server, data_dir: Path, damage: str) -> None:
    whole = pack([("noise", random.Random(0).randbytes(100_000))])
    server.body = {
        "cut": whole[:50_000],
        "not gzip": b"<html>Please log in</html>" * 100,
        "not tar": whole[:10] + bytes(1000),
        "empty": b"",
    }[damage]
    with pytest.raises(UserError, match=f"the archive from {server.url} was refused and removed"):
        bring(server, data_dir)
    assert_nothing(data_dir)


def test_an_archive_of_something_else(server: Server, data_dir: Path) -> None:
    server.body = pack([("cifar-10-batches-py/data_batch_1", b"pickled")])
    with pytest.raises(UserError, match="was refused and removed: it has no data_batch_1.bin"):
        bring(server, data_dir)
    assert_nothing(data_dir)


def test_an_archive_with_a_short_file(server: Server, data_dir: Path) -> None:
    server.body = pack([(f"{CIFAR10.folder}/{name}", b"short") for name in CIFAR10.files])
    with pytest.raises(
        UserError, match="was refused and removed: .*data_batch_1.bin has 5 bytes instead of 30,730,000"
    ):
        bring(server, data_dir)
    assert_nothing(data_dir)


def test_cifar100_comes_in_the_same_way(server: Server, data_dir: Path) -> None:
    members: list[tuple[str | tarfile.TarInfo, bytes]]
    members = [(f"{CIFAR100.folder}/{name}", bytes(CIFAR100.bytes_of(name))) for name in CIFAR100.files]
    server.body = pack(members)
    given = {"dataset": "cifar100", "data_dir": data_dir, "data_url": server.url, "data_md5": md5(server.body)}
    (data_dir / CIFAR10.folder).mkdir(parents=True)
    (data_dir / CIFAR10.folder / CIFAR10.files[0]).touch()  # another set beside it is no hindrance
    source, folder = prepare(make(DataSettings, given), warn=pytest.fail)
    assert (source.name, folder) == ("cifar100", data_dir / CIFAR100.folder)
    assert source.read(folder).classes == 100
    assert not list(data_dir.glob("*.part"))


def test_a_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"cannot write {tmp_path}/file.*Not a directory"):
        bring(server, tmp_path / "file" / "data")


def test_a_disk_that_is_full(server: Server, data_dir: Path) -> None:
    """A limit on the size of files stands in for the disk: the write fails in the same place."""
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from hvd_cifar.data.cifar import CIFAR10; from hvd_cifar.data.download import fetch\n"
        "from hvd_cifar.errors import UserError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[4]), int(sys.argv[4])))\n"
        "try: fetch(CIFAR10, Path(sys.argv[1]), sys.argv[2], sys.argv[3])\n"
        "except UserError as error: print(type(error).__name__, error)"
    )
    # While downloading, and, as the second call finds most of the archive there, while unpacking.
    for limit in (500_000, 5_000_000):
        command = [sys.executable, "-c", program, str(data_dir), server.url, md5(server.body), str(limit)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True, cwd=ROOT)
        assert re.fullmatch(r"UserError cannot write .*File too large.*--data-dir\n", done.stdout)
    assert part_of(server, data_dir).read_bytes() == server.body
    assert not (data_dir / ".unfinished").exists()
