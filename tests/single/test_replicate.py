"""A data set taken apart into blocks and put together again: whole and right, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from hvd_cifar.data import cifar, replicate
from hvd_cifar.errors import UserError


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of short files, of a length that is no multiple of a block's."""
    monkeypatch.setattr(cifar, "FILE_BYTES", 2500)
    monkeypatch.setattr(replicate, "BLOCK_BYTES", 1000)
    folder = tmp_path / "source"
    folder.mkdir()
    for number, name in enumerate(cifar.FILES):
        (folder / name).write_bytes(np.random.default_rng(number).bytes(2500))
    return folder


def _send(source: Path, receiver: replicate.Receiver, spoil: int = -1) -> replicate.Sender:
    sender = replicate.Sender(source)
    for number, block in enumerate(replicate.blocks()):
        content = sender.read(block).copy()
        content[0] ^= number == spoil
        receiver.take(block, content)
    return sender


def test_what_arrives_is_what_was_sent(source: Path, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    expected = replicate.digests(source)
    receiver = replicate.Receiver(data_dir)
    _send(source, receiver).finish()
    receiver.finish(expected, data_dir / "set")
    assert replicate.digests(data_dir / "set") == expected
    assert sorted(path.name for path in data_dir.iterdir()) == [".lock", "set"]


def test_an_empty_folder_is_no_set_and_a_full_one_stays(source: Path, tmp_path: Path) -> None:
    place = tmp_path / "data" / "set"
    place.mkdir(parents=True)
    expected = replicate.digests(source)
    for _ in range(2):  # the second time another process has been there before
        receiver = replicate.Receiver(tmp_path / "data")
        _send(source, receiver).finish()
        receiver.finish(expected, place)
        assert replicate.digests(place) == expected


def test_a_wrong_byte_is_noticed(source: Path, tmp_path: Path) -> None:
    receiver = replicate.Receiver(tmp_path / "data")
    _send(source, receiver, spoil=7)
    with pytest.raises(UserError, match=r"data_batch_3\.bin arrived damaged"):
        receiver.finish(replicate.digests(source), tmp_path / "data" / "set")
    assert not [path for path in (tmp_path / "data").iterdir() if path.name != ".lock"]


def test_failures_wait_for_the_end(source: Path, tmp_path: Path) -> None:
    """Whoever fails must go on taking part: the other ranks are in the same broadcasts."""
    expected = replicate.digests(source)
    (tmp_path / "file").touch()
    receiver = replicate.Receiver(tmp_path / "file")  # not a folder
    (source / cifar.FILES[3]).unlink()
    sender = _send(source, receiver)
    with pytest.raises(UserError, match=r"cannot read .*data_batch_4\.bin: No such file"):
        sender.finish()
    with pytest.raises(UserError, match="cannot write"):
        receiver.finish(expected, tmp_path / "file" / "set")


def test_what_a_killed_receiver_left_is_cleared(source: Path, tmp_path: Path) -> None:
    first = replicate.Receiver(tmp_path / "data")
    assert first._scratch
    left = first._scratch.with_name(first._scratch.name.replace(str(os.getpid()), "999999999"))
    first._scratch.rename(left)
    replicate.Receiver(tmp_path / "data")
    assert not left.exists()
