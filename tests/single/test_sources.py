"""Which rank speaks for which host, and how hosts with different data are told."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from hvd_cifar import config, use_settings
from hvd_cifar.data.place import NOBODY, digest_of
from hvd_cifar.data.source import Source
from hvd_cifar.errors import UserError
from hvd_cifar.training import sources
from hvd_cifar.training.sources import differences, speakers


def _ranks(*hosts: tuple[str, int], in_turn: bool = False) -> tuple[list[tuple[str, int, int]], list[int]]:
    """Ranks of these hosts (name, slots) as a launcher numbers them, and the speaker of each."""
    places = [(host, local) for host, (_, slots) in enumerate(hosts) for local in range(slots)]
    if in_turn:
        places.sort(key=lambda place: (place[1], place[0]))
    ranks = [(*hosts[host][:1], local, hosts[host][1]) for host, local in places]
    return ranks, [places.index((host, 0)) for host, _ in places]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize(
    "hosts",
    [
        [("a", 1)],
        [("a", 4)],
        [("a", 2), ("b", 2)],
        [("a", 2), ("a", 2)],
        [("a", 3), ("b", 1), ("a", 2)],
        [("a", 1), ("a", 3), ("a", 2), ("b", 3)],
    ],
)
def test_every_host_has_a_speaker_also_where_names_repeat(hosts: list[tuple[str, int]], in_turn: bool) -> None:
    ranks, expected = _ranks(*hosts, in_turn=in_turn)
    assert speakers(ranks) == expected


def test_hosts_with_different_data_are_named_in_the_order_of_the_ranks() -> None:
    assert differences([("a", "x"), ("b", "x")]) == ""
    assert differences([("c", "y"), ("a", "x"), ("b", "y")]) == "y on c, b; x on a"
    many = [(f"n{i}", "x") for i in range(64)]
    assert differences([*many, ("odd", "y")]) == "x on n0, n1, n2, n3 and 60 more; y on odd"


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


def _source(data_dir: Path, locate: Path | None = None) -> Source:
    """A set of two small files, whose usual place is `data_dir`/set."""
    return Source(
        "set", data_dir, tuple(FILES), data_dir / "set", lambda _: locate, lambda _: data_dir, lambda _: pytest.fail()
    )


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
    source = _source(tmp_path / "data")
    assert sources._find(replace(source, locate=lambda _: same), expected, "host", NOBODY) == same
    assert sources._find(source, expected, "host", NOBODY) is None
    source = replace(source, locate=lambda _: other)
    with pytest.raises(UserError, match=rf"^host: {other}/b.bin is damaged or not rank 0's .*: move {other} away"):
        sources._find(source, expected, "host", NOBODY)
    (other / "b.bin").unlink()
    with pytest.raises(UserError, match="b.bin is damaged or not rank 0's"):
        sources._find(source, expected, "host", NOBODY)


def _receive(source: Source, digests: dict[str, str], **changed: bytes) -> Path:
    scratch = sources._scratch(source.data_dir)
    for name, content in FILES.items():
        for byte in changed.get(name[0], content):
            sources._append(scratch, name, bytes([byte]))
    try:
        return sources._put(scratch, source, digests)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def test_received_files_come_to_the_usual_place_or_to_one_of_their_own(tmp_path: Path) -> None:
    expected, source = _digests(_write(tmp_path / "root")), _source(tmp_path / "data")
    for _ in range(2):  # the second time another process has been faster
        assert _receive(source, expected) == tmp_path / "data" / "set"
    assert _digests(tmp_path / "data" / "set") == expected
    assert (tmp_path / "data" / "set").stat().st_mode & 0o055 == 0o055
    shutil.rmtree(tmp_path / "data")
    users = _write(tmp_path / "data" / "set", a=b"mine")
    received = _receive(source, expected)
    assert received.name.startswith("received-") and _digests(received) == expected
    assert (users / "a.bin").read_bytes() == b"mine"
    (received / "a.bin").write_bytes(b"damaged")  # a set that was received before, and is damaged, is replaced
    assert _receive(source, expected) == received and _digests(received) == expected
    assert sources._find(source, expected, "host", NOBODY) == received  # the next start finds it
    shutil.rmtree(users)
    users.symlink_to(tmp_path)  # a link is not written through
    assert _receive(source, expected) == received


def test_a_wrong_byte_is_noticed(tmp_path: Path) -> None:
    expected, source = _digests(_write(tmp_path / "root")), _source(tmp_path / "data")
    with pytest.raises(UserError, match=r"b\.bin arrived damaged"):
        _receive(source, expected, b=b"sec0nd")
    assert [path.name for path in (tmp_path / "data").iterdir()] == [".lock"]


def test_what_a_killed_rank_left_is_removed_after_a_day(tmp_path: Path) -> None:
    left, living = sources._scratch(tmp_path), sources._scratch(tmp_path)
    os.utime(left, (0, 0))
    assert sources._scratch(tmp_path).is_dir()
    assert living.is_dir() and not left.exists()


def test_a_disk_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot write .*gone/a.bin: No such file or directory: free space"):
        sources._append(tmp_path / "gone", "a.bin", b"x")
    with pytest.raises(UserError, match="cannot read .*gone/a.bin: No such file or directory"):
        sources._read(tmp_path / "gone" / "a.bin", 0)
