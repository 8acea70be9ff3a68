"""The binary layout: every file's length, every label, and the order of the pixels."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from hvd_cifar.data import cifar, dataset
from hvd_cifar.data.download import DownloadError
from hvd_cifar.errors import UserError

URL, MD5 = "http://127.0.0.1:9/cifar-10-binary.tar.gz", "0" * 32  # nobody listens there


def write_sparse(folder: Path) -> None:
    """Six files of the true length, all zeros; they take no room on the disk."""
    folder.mkdir(parents=True)
    for name in cifar.FILES:
        with open(folder / name, "wb") as file:
            file.truncate(cifar.FILE_BYTES)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_sparse(tmp_path / "set")
    return tmp_path / "set"


def no_warning(message: str) -> None:
    pytest.fail(f"warned: {message}")


def prepare(name: dataset.Name, data_dir: Path) -> dataset.Prepared:
    return dataset.prepare(name, data_dir, URL, MD5, show_progress=False, warn=no_warning)


def test_the_constants_are_the_published_ones() -> None:
    assert cifar.RECORD_BYTES == 3073
    assert cifar.FILE_BYTES == 30_730_000
    assert cifar.FILES == (
        "data_batch_1.bin",
        "data_batch_2.bin",
        "data_batch_3.bin",
        "data_batch_4.bin",
        "data_batch_5.bin",
        "test_batch.bin",
    )


def test_locate_finds_the_files_themselves_and_one_folder_down(tmp_path: Path) -> None:
    assert cifar.locate(tmp_path / "absent") is None
    assert cifar.locate(tmp_path) is None
    (tmp_path / cifar.FOLDER).mkdir()
    assert cifar.locate(tmp_path) is None  # a folder without files is no data set
    (tmp_path / cifar.FOLDER / "test_batch.bin").touch()
    assert cifar.locate(tmp_path) == tmp_path / cifar.FOLDER
    assert cifar.locate(tmp_path / cifar.FOLDER) == tmp_path / cifar.FOLDER


def test_read_gives_every_pixel_its_place(folder: Path) -> None:
    random = np.random.default_rng(0)
    expected = []
    for name in cifar.FILES:
        images = random.integers(0, 256, (10_000, 32, 32, 3), np.uint8)
        labels = random.integers(0, 10, 10_000, np.uint8)
        # Red, green, blue planes after the label, as the page describes them.
        planes = np.concatenate([labels[:, None]] + [images[..., c].reshape(10_000, 1024) for c in range(3)], axis=1)
        planes.tofile(folder / name)
        expected.append((images, labels))

    train, test = dataset.load(dataset.Prepared("cifar10", folder))

    assert train.images.shape == (50_000, 32, 32, 3) and test.images.shape == (10_000, 32, 32, 3)
    assert train.images.dtype == np.uint8 and train.labels.dtype == np.int32
    for number, (images, labels) in enumerate(expected[:5]):
        rows = slice(number * 10_000, (number + 1) * 10_000)
        assert np.array_equal(train.images[rows], images)
        assert np.array_equal(train.labels[rows], labels)
    assert np.array_equal(test.images, expected[5][0])
    assert np.array_equal(test.labels, expected[5][1])
    mixed = np.array([49_999, 0, 25_000, 10_000, 25_000, 9_999])
    assert (train.images[mixed] == np.asarray(train.images)[mixed]).all()


def test_images_are_mapped_not_copied(folder: Path) -> None:
    """What is written to a file afterwards is what the next batch holds: this process has no copy of the set."""
    for name in cifar.FILES:
        np.zeros((10_000, cifar.RECORD_BYTES), np.uint8).tofile(folder / name)
    train = cifar.read(folder, "train")
    assert train.images[np.array([12_345])].max() == 0
    with (folder / "data_batch_2.bin").open("r+b") as file:
        file.seek(2_345 * cifar.RECORD_BYTES + 1)
        file.write(bytes([200]))
    assert train.images[np.array([12_345])][0, 0, 0].tolist() == [200, 0, 0]


@pytest.mark.parametrize(
    "split, name", [("train", "data_batch_1.bin"), ("train", "data_batch_5.bin"), ("test", "test_batch.bin")]
)
@pytest.mark.parametrize("size", [None, 0, 30_729_999, 30_726_927, 30_730_001, 30_733_073])
def test_a_file_that_is_missing_or_of_another_length_is_named(
    folder: Path, split: cifar.Split, name: str, size: int | None
) -> None:
    if size is None:
        (folder / name).unlink()
    else:
        with open(folder / name, "r+b") as file:
            file.truncate(size)
    with pytest.raises(UserError, match=re.escape(str(folder / name))) as caught:
        cifar.read(folder, split)
    message = str(caught.value)
    assert "30,730,000" in message
    assert "\n" not in message
    if size is not None:
        assert f"{size:,} bytes" in message


def test_only_the_files_of_the_split_are_needed(folder: Path) -> None:
    (folder / "data_batch_3.bin").unlink()
    assert len(cifar.read(folder, "test").labels) == 10_000


def test_a_label_above_nine_is_named_with_its_record(folder: Path) -> None:
    with open(folder / "data_batch_2.bin", "r+b") as file:
        file.seek(1234 * 3073)
        file.write(bytes([10]))
    with pytest.raises(UserError, match=r"data_batch_2\.bin is damaged: the label of record 1234 is 10"):
        cifar.read(folder, "train")


def test_nine_is_a_label(folder: Path) -> None:
    with open(folder / "test_batch.bin", "r+b") as file:
        file.seek(9_999 * 3073)
        file.write(bytes([9]))
    assert cifar.read(folder, "test").labels[-1] == 9


@pytest.mark.parametrize("name", ["auto", "cifar10"])
def test_files_that_are_there_are_used_without_a_download(tmp_path: Path, name: dataset.Name) -> None:
    write_sparse(tmp_path / cifar.FOLDER)
    assert prepare(name, tmp_path) == ("cifar10", tmp_path / cifar.FOLDER)
    assert sorted(path.name for path in tmp_path.iterdir()) == [cifar.FOLDER]  # nothing else was written


@pytest.mark.parametrize("name", ["auto", "cifar10"])
@pytest.mark.parametrize("file", ["data_batch_1.bin", "data_batch_4.bin", "test_batch.bin"])
@pytest.mark.parametrize("size", [None, 30_729_999, 30_730_001])
def test_a_damaged_set_is_an_error_under_auto_too(
    folder: Path, name: dataset.Name, file: str, size: int | None
) -> None:
    if size is None:
        (folder / file).unlink()
    else:
        with open(folder / file, "r+b") as opened:
            opened.truncate(size)
    with pytest.raises(UserError, match=file) as caught:
        prepare(name, folder)
    assert not isinstance(caught.value, DownloadError)
