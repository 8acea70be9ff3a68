"""A data set taken apart into blocks and put together again: whole and right, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hvd_cifar.data import replicate
from hvd_cifar.errors import UserError

LENGTHS = {"a.bin": 2500, "b.bin": 1, "c.bin": 3000, "d.json": 999}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of short files, of lengths that are and are not multiples of a block's."""
    monkeypatch.setattr(replicate, "BLOCK_BYTES", 1000)
    folder = tmp_path / "source"
    folder.mkdir()
    for number, (name, length) in enumerate(LENGTHS.items()):
        (folder / name).write_bytes(np.random.default_rng(number).bytes(length))
    return folder


def _digests(folder: Path) -> dict[str, replicate.File]:
    return replicate.describe(folder, list(LENGTHS))


def _send(
    source: Path, expected: dict[str, replicate.File], receiver: replicate.Receiver, spoil: int = -1
) -> replicate.Sender:
    sender = replicate.Sender(source)
    for number, block in enumerate(replicate.blocks(expected)):
        content = sender.read(block).copy()
        content[0] ^= number == spoil
        receiver.take(block, content)
    return sender


def test_what_arrives_is_what_was_sent(source: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    expected = _digests(source)
    receiver = replicate.Receiver(data_dir, expected)
    _send(source, expected, receiver).finish()
    receiver.finish(data_dir / "set")
    assert _digests(data_dir / "set") == expected
    assert sorted(path.name for path in data_dir.iterdir()) == [".lock", "set"]


def test_an_empty_folder_is_no_set_and_a_full_one_stays(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "data" / "set"
    place.mkdir(parents=True)
    expected = _digests(source)
    for _ in range(2):  # the second time another process has been there before
        receiver = replicate.Receiver(tmp_path / "data", expected)
        _send(source, expected, receiver).finish()
        receiver.finish(place)
        assert _digests(place) == expected


def test_a_received_set_that_was_damaged_is_replaced_and_a_folder_of_the_user_s_stays(
    source: Path, tmp_path: Path
) -> None:
    expected = _digests(source)
    for name in ("received-1f", "set"):
        place = tmp_path / "data" / name
        place.mkdir(parents=True)
        for file in expected:
            (place / file).write_bytes(b"damaged")
        receiver = replicate.Receiver(tmp_path / "data", expected)
        _send(source, expected, receiver).finish()
        if name == "set":
            with pytest.raises(UserError, match="set holds other files than those received: move it away"):
                receiver.finish(place)
            assert all((place / file).read_bytes() == b"damaged" for file in expected)
        else:
            receiver.finish(place)
            assert _digests(place) == expected


def test_a_wrong_byte_is_noticed(source: Path, tmp_path: Path) -> None:
    expected = _digests(source)
    receiver = replicate.Receiver(tmp_path / "data", expected)
    _send(source, expected, receiver, spoil=5)
    with pytest.raises(UserError, match=r"c\.bin arrived damaged"):
        receiver.finish(tmp_path / "data" / "set")
    assert not [path for path in (tmp_path / "data").iterdir() if path.name != ".lock"]


def test_failures_wait_for_the_end(source: Path, tmp_path: Path) -> None:
    """Whoever fails must go on taking part: the other ranks are in the same broadcasts."""
    expected = _digests(source)
    (tmp_path / "file").touch()
    receiver = replicate.Receiver(tmp_path / "file", expected)  # not a folder
    (source / "c.bin").unlink()
    sender = _send(source, expected, receiver)
    with pytest.raises(UserError, match=r"cannot read .*c\.bin: No such file"):
        sender.finish()
    with pytest.raises(UserError, match="cannot write"):
        receiver.finish(tmp_path / "file" / "set")


def test_what_a_killed_receiver_left_is_cleared(source: Path, tmp_path: Path) -> None:
    expected = _digests(source)
    first = replicate.Receiver(tmp_path / "data", expected)
    assert first._scratch
    left = first._scratch.with_name(first._scratch.name.replace(str(os.getpid()), "999999999"))
    first._scratch.rename(left)
    of_other_host = left.with_name(left.name.replace("999999999-", "999999999-1-"))  # whose name ends with a number
    of_other_host.mkdir()
    replicate.Receiver(tmp_path / "data", expected)
    assert not left.exists() and of_other_host.exists()


def test_a_living_receiver_keeps_its_folder(source: Path, tmp_path: Path) -> None:
    """Two jobs of this host receive into one data folder: neither clears what the other has written so far."""
    expected = _digests(source)
    blocks = list(replicate.blocks(expected))
    first, sender = replicate.Receiver(tmp_path / "data", expected), replicate.Sender(source)
    for block in blocks[:4]:
        first.take(block, sender.read(block))
    assert first._scratch
    another = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        of_another = first._scratch.with_name(first._scratch.name.replace(str(os.getpid()), str(another.pid)))
        of_another.mkdir()
        replicate.Receiver(tmp_path / "data", expected)
        assert of_another.exists()
    finally:
        another.communicate(b"\n")
    for block in blocks[4:]:
        first.take(block, sender.read(block))
    first.finish(tmp_path / "data" / "set")
    assert _digests(tmp_path / "data" / "set") == expected


@pytest.mark.parametrize("at", [0, 3, 6])
def test_no_error_of_the_disk_is_swallowed(source: Path, tmp_path: Path, at: int) -> None:
    """The disk is full from one block on, and has room again at the end: the set must not come into its place."""
    expected = _digests(source)
    receiver, sender = replicate.Receiver(tmp_path / "data", expected), replicate.Sender(source)
    assert receiver._scratch
    for number, block in enumerate(replicate.blocks(expected)):
        moved = receiver._scratch.with_name("away")
        if number == at:
            receiver._scratch.rename(moved)  # so that this block cannot be written
        receiver.take(block, sender.read(block))
        if number == at:
            moved.rename(receiver._scratch)
    sender.finish()
    with pytest.raises(UserError, match="cannot write .*: No such file or directory: free space"):
        receiver.finish(tmp_path / "data" / "set")
    assert not (tmp_path / "data" / "set").exists()
    assert not [path for path in (tmp_path / "data").iterdir() if path.name != ".lock"]


def test_a_place_that_cannot_be_taken_is_an_error(source: Path, tmp_path: Path) -> None:
    expected = _digests(source)
    receiver = replicate.Receiver(tmp_path / "data", expected)
    _send(source, expected, receiver).finish()
    (tmp_path / "data" / "set").touch()  # a file, where the folder is to be
    with pytest.raises(UserError, match="cannot write .*: Not a directory"):
        receiver.finish(tmp_path / "data" / "set")


def test_a_source_that_shrinks_is_an_error(source: Path, tmp_path: Path) -> None:
    expected = _digests(source)
    (source / "d.json").write_bytes(b"short")
    sender = _send(source, expected, replicate.Receiver(tmp_path / "data", expected))
    with pytest.raises(UserError, match=r"cannot read .*d\.json: it has become shorter"):
        sender.finish()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x", "..", ".", "", "a/b"])
def test_a_name_that_leaves_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    receiver = replicate.Receiver(tmp_path / "data", {name: replicate.File(1, "")})
    receiver.take(replicate.Block(name, 0, 1), np.zeros(1, np.uint8))
    with pytest.raises(UserError, match="the name leaves the folder"):
        receiver.finish(tmp_path / "data" / "set")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_the_data_folder_is_not_written_through(source: Path, tmp_path: Path) -> None:
    """Blocks go into a new folder of a random name; where another has put a link in the set's place, that stays."""
    data_dir, outside = tmp_path / "there", tmp_path / "outside"
    data_dir.mkdir()
    outside.mkdir()
    (data_dir / "set").symlink_to(outside)
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    receiver = replicate.Receiver(data_dir, replicate.describe(source, names))
    sender = replicate.Sender(source)
    for block in replicate.blocks(replicate.describe(source, names)):
        receiver.take(block, sender.read(block))
    with pytest.raises(UserError, match="cannot write"):
        receiver.finish(data_dir / "set")
    assert list(outside.iterdir()) == []
