"""The binary layouts: each file's length, labels, the order of the pixels; the embedded set, the same everywhere."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import cifar, synthetic
from hvd_cifar.data.cifar import CIFAR10, CIFAR100, DownloadError, Layout
from hvd_cifar.data.host_files import Onlooker
from hvd_cifar.data.source import prepare
from hvd_cifar.data.synthetic import LAYOUT
from hvd_cifar.errors import UserError

LAYOUTS = pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=lambda layout: layout.name)


def write_sparse(folder: Path, layout: Layout) -> Path:
    """Files of the true length, all zeros; they take no room on the disk."""
    folder.mkdir(parents=True)
    for name in layout.files:
        with open(folder / name, "wb") as file:
            file.truncate(layout.bytes_of(name))
    return folder


@pytest.fixture(autouse=True)
def _no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "fetch", lambda *_: pytest.fail("it is downloaded"))


def prepared_folder(name: str, data_dir: Path, warn: Callable[[str], None] = pytest.fail) -> tuple[str, Path]:
    settings = make(DataSettings, {"dataset": name, "data_dir": data_dir})
    source, folder = prepare(settings, Onlooker(is_warned=warn))
    return source.name, folder


@LAYOUTS
def test_locate_finds_the_files_themselves_and_one_folder_down(tmp_path: Path, layout: Layout) -> None:
    assert layout.locate(tmp_path / "absent") is None
    assert layout.locate(tmp_path) is None
    (tmp_path / layout.folder).mkdir()
    assert layout.locate(tmp_path) is None  # a folder without files is no data set
    (tmp_path / layout.folder / layout.files[-1]).touch()
    assert layout.locate(tmp_path) == tmp_path / layout.folder
    assert layout.locate(tmp_path / layout.folder) == tmp_path / layout.folder


@LAYOUTS
def test_read_gives_every_pixel_its_place(tmp_path: Path, layout: Layout) -> None:
    layout = replace(layout, train=dict.fromkeys(layout.train, 70), test=dict.fromkeys(layout.test, 30))
    random, pixels, classes = np.random.default_rng(0), [], []
    for name in layout.files:
        count = layout.bytes_of(name) // layout.record_bytes
        images = random.integers(0, 256, (count, 32, 32, 3), np.uint8)
        labels = random.integers(0, layout.classes, count, np.uint8)
        coarse = [random.integers(0, 20, (count, 1), np.uint8)] * (layout.label_bytes - 1)
        # Red, green, blue planes after the labels, as the page describes them.
        planes = [images[..., c].reshape(count, 1024) for c in range(3)]
        np.concatenate([*coarse, labels[:, None], *planes], axis=1).tofile(tmp_path / name)
        pixels.append(images)
        classes.append(labels)
    dataset = layout.read(tmp_path)
    assert dataset.name == layout.name and dataset.classes == layout.classes
    assert dataset.train.labels.dtype == np.int32
    for part, images, labels in (
        (dataset.train, np.concatenate(pixels[:-1]), np.concatenate(classes[:-1])),
        (dataset.test, pixels[-1], classes[-1]),
    ):
        assert part.images.shape == images.shape and part.images.dtype == np.uint8
        assert np.array_equal(part.images[:], images) and np.array_equal(part.labels, labels)
        mixed = random.permutation(len(labels))[:20]
        assert np.array_equal(part.images[mixed], images[mixed])
    if layout.name == "cifar100":  # CIFAR-10 has the published numbers
        whole = np.concatenate(pixels[:-1]).reshape(-1, 3)
        assert np.allclose(dataset.channel_mean, whole.mean(axis=0), atol=1e-9)
        assert np.allclose(dataset.channel_deviation, whole.std(axis=0), atol=1e-9)


def test_images_are_read_from_the_files_and_a_cut_file_is_named(tmp_path: Path) -> None:
    """What is written to a file afterwards is what the next batch holds: this process has no copy of the set."""
    train = CIFAR10.read(write_sparse(tmp_path / "set", CIFAR10)).train
    file = tmp_path / "set" / "data_batch_2.bin"
    with file.open("r+b") as opened:
        opened.seek(2_345 * CIFAR10.record_bytes + 1)
        opened.write(bytes([200]))
    assert train.images[np.array([12_345])][0, 0, 0].tolist() == [200, 0, 0]
    os.truncate(file, 2_345 * CIFAR10.record_bytes + 100)
    assert len(train.images[np.array([12_344, 0, 49_999])]) == 3
    for index in (np.array([7, 12_345]), slice(12_000, 12_400)):
        with pytest.raises(UserError, match=r"data_batch_2.bin has become shorter while it was read: restore it"):
            train.images[index]


def test_class_names_are_read_where_they_are_there_and_a_label_of_no_class_is_named(tmp_path: Path) -> None:
    folder = write_sparse(tmp_path / "set", CIFAR10)
    assert CIFAR10.read(folder).class_names == ()
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij") + "\n\n")
    with open(folder / "data_batch_2.bin", "r+b") as file:
        for label in (9, 10):
            file.seek(1234 * 3073)
            file.write(bytes([label]))
            file.flush()
            if label == 9:
                assert CIFAR10.read(folder).class_names == tuple("abcdefghij")
    with pytest.raises(UserError, match=r"data_batch_2.bin is damaged: the label of record 1234 is 10, not 0 to 9:"):
        CIFAR10.read(folder)


@pytest.mark.parametrize("name", ["auto", "cifar10", "cifar100"])
def test_files_that_are_there_are_used_without_a_download(tmp_path: Path, name: str) -> None:
    layout = CIFAR100 if name == "cifar100" else CIFAR10
    write_sparse(tmp_path / layout.folder, layout)
    assert prepared_folder(name, tmp_path) == (layout.name, tmp_path / layout.folder)
    assert [path.name for path in tmp_path.iterdir()] == [layout.folder]  # nothing else was written


@pytest.mark.parametrize("name", ["auto", "cifar10"])
@pytest.mark.parametrize(("file", "size"), [("data_batch_1.bin", None), ("test_batch.bin", 30_729_999)])
def test_a_file_that_is_missing_or_of_another_length_is_named_under_auto_too(
    tmp_path: Path, name: str, file: str, size: int | None
) -> None:
    folder = write_sparse(tmp_path / "set", CIFAR10)
    if size is None:
        (folder / file).unlink()
    else:
        os.truncate(folder / file, size)
    found = "no length (No such file or directory)" if size is None else f"{size:,} bytes"
    wanted = f"{folder / file} has {found} instead of 30,730,000: restore it, or move {folder} away"
    for use in (lambda: prepared_folder(name, folder), lambda: CIFAR10.read(folder)):
        with pytest.raises(UserError, match=re.escape(wanted)) as caught:
            use()
        assert not isinstance(caught.value, DownloadError) and "\n" not in str(caught.value)


# Of the six files one after the other. A change of the drawing needs a new name, or results of the same name could no
# longer be compared.
MD5 = {"synthetic-v2": "c829d6d2a91882896b08d1f678c826f9"}


def test_every_machine_draws_these_bytes_once(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    for name in LAYOUT.files:
        digest.update((embedded / LAYOUT.folder / name).read_bytes())
    assert digest.hexdigest() == MD5[LAYOUT.folder]
    names = (embedded / LAYOUT.folder / "batches.meta.txt").read_text().split()
    assert names == ["disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars", "pillars", "checker"]
    assert {path.name for path in embedded.iterdir()} <= {LAYOUT.folder, ".lock"}
    monkeypatch.setattr(synthetic, "draw_file", lambda number: pytest.fail("drew it again"))
    assert prepared_folder("synthetic", embedded) == ("synthetic", embedded / LAYOUT.folder)


def test_auto_falls_back_with_a_warning_and_cifar10_does_not(embedded: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def refused(*_: Any) -> Path:
        raise DownloadError("no network: check the cable")

    monkeypatch.setattr(cifar, "fetch", refused)
    warnings: list[str] = []
    assert prepared_folder("auto", embedded, warnings.append) == ("synthetic", embedded / LAYOUT.folder)
    assert len(warnings) == 1
    assert "NOT CIFAR-10" in warnings[0] and "no network" in warnings[0] and "\n" not in warnings[0]
    with pytest.raises(DownloadError, match="no network"):
        prepared_folder("cifar10", embedded)
