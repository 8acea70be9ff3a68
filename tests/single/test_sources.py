"""Names of data sets, and how files come from rank 0 to the other hosts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hvd_cifar import config, use_settings
from hvd_cifar.data.host_files import NOBODY, digest_of
from hvd_cifar.errors import UserError
from hvd_cifar.training import sources


@pytest.mark.parametrize("name", ["auto", "cifar10", "cifar100", "synthetic", "folder:/a/b", "/a/b.py:load", "a.b:c"])
def test_names_of_data_sets(name: str) -> None:
    assert config.make(config.DataSettings, {"dataset": name}).dataset == name


def test_paths_in_names_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    for given, expected in (
        ("folder:images", f"folder:{tmp_path}/images"),
        ("folder:~/images", "folder:/home/me/images"),
        ("sets/mine.py:load", f"{tmp_path}/sets/mine.py:load"),
        ("~/mine.py:load", "/home/me/mine.py:load"),
    ):
        assert config.make(config.DataSettings, {"dataset": given}).dataset == expected
        assert config.make(use_settings.EvaluateSettings, {"run_dir": "r", "dataset": given}).dataset == expected


@pytest.mark.parametrize(
    "name", ["cifra10", "", "cifar-10", "folder:", "mine.py:", "mine.py:1", "mine.py", "a b:c", ":c"]
)
def test_what_is_no_name_of_a_data_set_is_told_what_there_is(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--dataset {name}: ")) as caught:
        config.make(config.TrainSettings, {"dataset": name})
    message = str(caught.value)
    assert "\n" not in message and "folder:PATH" in message
    if name != "folder:":
        assert "auto, cifar10, cifar100, synthetic, folder:PATH, FILE.py:NAME or package.module:NAME" in message


FILES = {"a.bin": b"first", "b.bin": b"second"}


class Source:
    """A set of two small files in a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder

    def locate(self, *_: Any) -> Path | None:
        return self.folder


def _write(folder: Path, **changed: bytes) -> Path:
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(changed.get(name[0], content))
    return folder


def _digests(folder: Path) -> dict[str, str]:
    return {name: digest_of(folder / name) for name in FILES}


def test_a_host_with_another_set_is_named(tmp_path: Path) -> None:
    expected = _digests(_write(tmp_path / "root"))
    same, other = _write(tmp_path / "same"), _write(tmp_path / "other", b=b"spoilt")

    def found(folder: Path | None) -> Path | None:
        source: Any = Source(folder)
        return sources._found(source, tmp_path, NOBODY, expected, "host")

    assert found(same) == same and found(None) is None
    with pytest.raises(UserError, match=rf"^host: {other}/b.bin is damaged or not rank 0's .*: move {other} away"):
        found(other)
    (other / "b.bin").unlink()
    with pytest.raises(UserError, match="b.bin is damaged or not rank 0's"):
        found(other)


def test_files_arrive_whole_or_not_at_all_also_where_two_jobs_receive_them(tmp_path: Path) -> None:
    expected, folder = _digests(_write(tmp_path / "root")), tmp_path / "data" / "received"
    for name, content in FILES.items():
        for start in range(0, len(content), 2):
            sources._write(folder, name, start, content[start : start + 2])
            if start == 2:
                sources._write(folder, name, 0, content[:2])  # of the other job
        assert not (folder / name).exists()
        sources._complete(folder, name, expected[name])
        sources._write(folder, name, 2, content[2:])
        sources._complete(folder, name, expected[name])
    assert _digests(folder) == expected and (folder / "a.bin").stat().st_mode & 0o044 == 0o044
    (folder / "a.bin").write_bytes(b"damaged")
    sources._write(folder, "a.bin", 0, b"f1rst")
    with pytest.raises(UserError, match=r"a\.bin arrived damaged"):
        sources._complete(folder, "a.bin", expected["a.bin"])
    sources._write(folder, "a.bin", 0, b"first")
    sources._complete(folder, "a.bin", expected["a.bin"])
    assert _digests(folder) == expected


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write .*file/data: Not a directory: free space"):
        sources._write(tmp_path / "file" / "data", "a.bin", 0, b"x")
    with pytest.raises(UserError, match="cannot read .*gone/a.bin: No such file or directory"):
        sources._read(tmp_path / "gone" / "a.bin", 0)
