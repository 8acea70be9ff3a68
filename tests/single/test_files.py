"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvd_cifar.files import replace_lines, replace_text


def test_the_content_is_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(f"fsync {path.name}: {path.read_text()}" if path.is_file() else f"fsync {path.name}")
        fsync(descriptor)

    def seen_replace(source: Path, target: Path) -> None:
        calls.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    replace_text(tmp_path / "a.json", "ä")
    assert calls[1:] == ["replace", f"fsync {tmp_path.name}"]
    assert re.fullmatch(r"fsync a\.json\.\w+\.part: ä", calls[0])
    assert (tmp_path / "a.json").read_bytes() == "ä".encode()


def test_two_programs_may_write_the_same_file(tmp_path: Path) -> None:
    """As two runs that share a file: the second one begins and ends while the first one writes."""

    def lines() -> Iterator[bytes]:
        yield b"first "
        replace_text(tmp_path / "a.json", "other")
        yield b"second"

    replace_lines(tmp_path / "a.json", lines())
    assert (tmp_path / "a.json").read_text() == "first second"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_text(tmp_path / "a.json", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old" and [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    """Never tried on a device that is there: if the code were wrong, it would be gone from the machine."""
    folder, pipe = tmp_path / "folder", tmp_path / "pipe"
    folder.mkdir()
    os.mkfifo(pipe)
    for place in (folder, pipe, Path("/dev/no such device")):
        with pytest.raises(OSError, match="it is no regular file"):
            replace_text(place, "new")
    assert folder.is_dir() and pipe.is_fifo()
