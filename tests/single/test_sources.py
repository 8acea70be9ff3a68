"""Names of data sets, and how files come from rank 0 to the other hosts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvd_cifar import config
from hvd_cifar.data.host_files import digest_of
from hvd_cifar.errors import UserError
from hvd_cifar.training import sources


def test_names_of_data_sets_and_their_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    names = ["auto", "cifar10", "cifar100", "synthetic", "folder:/a/b", "/a/b.py:load", "a.b:c"]
    for given, expected in (
        *zip(names, names, strict=True),
        ("folder:images", f"folder:{tmp_path}/images"),
        ("folder:~/images", "folder:/home/me/images"),
        ("sets/mine.py:load", f"{tmp_path}/sets/mine.py:load"),
        ("~/mine.py:load", "/home/me/mine.py:load"),
    ):
        assert config.make(config.DataSettings, {"dataset": given}).dataset == expected
        assert config.make(config.EvaluateSettings, {"run_dir": "r", "dataset": given}).dataset == expected


@pytest.mark.parametrize(
    "name", ["cifra10", "", "cifar-10", "folder:", "mine.py:", "mine.py:1", "mine.py", "a b:c", ":c"]
)
def test_what_is_no_name_of_a_data_set_is_told_what_there_is(name: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"--dataset {name}: ")) as caught:
        config.make(config.TrainSettings, {"dataset": name})
    message = str(caught.value)
    assert "\n" not in message
    assert "auto, cifar10, cifar100, synthetic, folder:PATH, FILE.py:NAME or package.module:NAME" in message


FILES = {"a.bin": b"first", "b.bin": b"second"}


def _digests(folder: Path) -> dict[str, str]:
    return {name: digest_of(folder / name) for name in FILES}


def test_files_arrive_whole_or_not_at_all_also_where_two_jobs_receive_them(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "data" / "received"
    root.mkdir()
    for name, content in FILES.items():
        (root / name).write_bytes(content)
    expected = _digests(root)
    receive = sources._receive
    for name, content in FILES.items():
        for start in range(0, len(content), 2):
            receive(folder, name, expected[name], start, content[start : start + 2])
            if start == 2:
                receive(folder, name, expected[name], 0, content[:2])  # of the other job
        assert not (folder / name).exists()
        receive(folder, name, expected[name], len(content), b"")
        receive(folder, name, expected[name], 2, content[2:])
        receive(folder, name, expected[name], len(content), b"")
    assert _digests(folder) == expected and (folder / "a.bin").stat().st_mode & 0o044 == 0o044
    (folder / "a.bin").write_bytes(b"damaged")
    receive(folder, "a.bin", expected["a.bin"], 0, b"f1rst")
    with pytest.raises(UserError, match=r"a\.bin arrived damaged"):
        receive(folder, "a.bin", expected["a.bin"], 5, b"")
    receive(folder, "a.bin", expected["a.bin"], 0, b"first")
    receive(folder, "a.bin", expected["a.bin"], 5, b"")
    assert _digests(folder) == expected


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write .*file/data: Not a directory: free space"):
        sources._receive(tmp_path / "file" / "data", "a.bin", "", 0, b"x")
    with pytest.raises(UserError, match="cannot read .*gone/a.bin: No such file or directory"):
        sources._read(tmp_path / "gone" / "a.bin", 0)
