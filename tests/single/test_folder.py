"""A folder of images: what is read, what is refused, and the cache: whole or none, made once, anew after a change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.folder import CACHE, IMAGES, SUMS, Folder, as_text
from hvd_cifar.data.host_files import NOBODY, Onlooker
from hvd_cifar.data.pictures import read_image
from hvd_cifar.data.source import prepare
from hvd_cifar.errors import UserError
from tests.run_dirs import full_disk

CLASSES = ("ant", "bee", "cat")


def _pixels(seed: int, *shape: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, shape or (6, 5, 3)).astype(np.uint8)


def _save(path: Path, pixels: NDArray[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def birds(tmp_path: Path) -> Path:
    """Four training images and two test images of each class, 6 x 5 pixels, each other ones."""
    path = tmp_path / "birds"
    for label, name in enumerate(CLASSES):
        for i in range(4):
            _save(path / "train" / name / f"{i}.png", _pixels(10 * label + i))
        for i in range(2):
            _save(path / "test" / name / f"{i}.png", _pixels(100 + 10 * label + i))
    return path


def _prepare(path: Path, onlooker: Onlooker = NOBODY) -> Path:
    return Folder(path).prepare(path.parent / "data", onlooker)


def _read(path: Path, onlooker: Onlooker = NOBODY) -> Dataset:
    return Folder(path).read(_prepare(path, onlooker))


def test_every_pixel_has_its_place_and_class(birds: Path) -> None:
    settings = make(DataSettings, {"dataset": f"folder:{birds}", "data_dir": birds.parent / "data"})
    source, folder = prepare(settings, Onlooker(is_warned=pytest.fail))
    dataset = source.read(folder)
    assert (dataset.name, dataset.classes, dataset.class_names) == ("birds", 3, CLASSES)
    assert dataset.train.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert dataset.test.labels.tolist() == [0, 0, 1, 1, 2, 2] and dataset.test.labels.dtype == np.int32
    train = np.stack([_pixels(10 * label + i) for label in range(3) for i in range(4)])
    assert (dataset.train.images[:] == train).all()
    assert (dataset.test.images[np.array([5, 0])] == [_pixels(121), _pixels(100)]).all()
    assert np.allclose(dataset.channel_mean, train.reshape(-1, 3).mean(axis=0))
    assert np.allclose(dataset.channel_deviation, train.reshape(-1, 3).std(axis=0))
    assert not (birds.parent / "data").exists()  # the cache is beside the images


def test_other_layouts_and_formats(birds: Path) -> None:
    (birds / "test").rename(birds / "VALID")
    ants = (birds / "train").rename(birds / "Training") / "ant"
    (ants / "images").mkdir()
    (ants / "0.png").rename(ants / "images" / "0.png")  # sorts after 3.png
    for name, suffix in (("1", "JPG"), ("2", "webp"), ("3", "bmp")):
        with Image.open(ants / f"{name}.png") as image:
            image.save(ants / f"{name}.{suffix}", lossless=True)
        (ants / f"{name}.png").unlink()
    shutil.rmtree(birds / "VALID" / "bee")  # a class without a test image
    dataset = _read(birds.rename(birds.with_name("cifar10")))
    assert dataset.name == "folder:cifar10"  # it is not that set
    assert as_text(os.fsdecode(b"caf\xe9")) == "caf\\xe9"  # a name that is not UTF-8
    assert dataset.class_names == CLASSES and dataset.test.labels.tolist() == [0, 0, 2, 2]
    assert (dataset.train.images[np.array([1, 2, 3])] == [_pixels(2), _pixels(3), _pixels(0)]).all()


def test_grey_images_have_one_channel_unless_one_is_coloured(birds: Path) -> None:
    for i, path in enumerate(sorted(birds.rglob("*.png"))):
        _save(path, _pixels(i, 6, 5))
    grey = _read(birds)
    assert grey.image_shape == (6, 5, 1)
    assert (grey.train.images[np.array([0])][0, :, :, 0] == _pixels(6, 6, 5)).all()  # test/ sorts before train/
    _save(birds / "test" / "cat" / "1.png", _pixels(7))
    coloured = _read(birds)
    assert (coloured.train.images[np.array([0])][0] == _pixels(6, 6, 5)[:, :, None]).all()
    assert (coloured.test.images[np.array([5])][0] == _pixels(7)).all()


def test_links_to_folders_are_followed_but_not_in_circles(birds: Path) -> None:
    usual = _read(birds)
    for path, target in (("train/ant", "real ant"), ("train/bee", "real bee")):
        (birds / path).rename(birds / target)
        (birds / path).mkdir()
        (birds / path / "images").symlink_to(birds / target)
        (birds / target / "back").symlink_to(birds / path)
        (birds / target / "itself").symlink_to(".")
    assert _read(birds).digest == usual.digest


@pytest.mark.parametrize(
    ("removed", "made", "message"),
    [
        (["."], [], "there is no such folder"),
        (["train"], [], "it has a folder test, but no train"),
        (["train", "test"], [], "it has no folders of classes"),
        ([], ["test/dog"], "test/dog is no class of train"),
        ([], ["train/dog"], r"train/dog has no images \(.avif, .bmp"),
        (["test"], ["test/ant"], "test has no images"),
        (["train/bee", "train/cat"], [], "train has one class, ant"),
    ],
)
def test_another_layout_is_refused_in_one_line(birds: Path, removed: list[str], made: list[str], message: str) -> None:
    for name in removed:
        shutil.rmtree(birds / name)
    for name in made:
        (birds / name).mkdir(parents=True)
    with pytest.raises(UserError, match=f"--dataset folder:{birds}: {message}") as caught:
        _read(birds)
    assert "\n" not in str(caught.value) and ";" in str(caught.value)


def test_folders_that_cannot_be_searched_are_named(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = birds.parent / ("x" * 300)
    for use in (lambda: Folder(long).locate(birds), lambda: _read(long)):
        with pytest.raises(UserError, match=f"cannot read {long}: File name too long: allow reading there, or"):
            use()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # so that the cache is in the data folder
    with pytest.raises(UserError, match=f"cannot write {long}/folder-birds-.*: File name too long"):
        Folder(birds).prepare(long)


def test_the_cache_is_made_once_and_anew_after_a_change(birds: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, before = _prepare(birds), _read(birds)
    with monkeypatch.context() as patched:
        patched.setattr(Folder, "_make", lambda *_: pytest.fail("decoded it again"))
        assert _prepare(birds) == first
        patched.setattr(os, "access", lambda path, mode: not mode & os.W_OK)  # others have made it
        assert _prepare(birds) == first and not (birds.parent / "data").exists()
    os.utime(birds / "train" / "ant" / "0.png", ns=(1, 1))
    second = _prepare(birds)
    assert second != first and not first.exists()
    assert _read(birds).digest == before.digest
    (birds / "train" / "ant" / "0.png").rename(birds / "train" / "bee" / "9.png")
    assert _read(birds).train.labels.tolist() == [0] * 3 + [1] * 5 + [2] * 4
    for part in ("train", "test"):  # sizes, times and order stay
        (birds / part / "cat").rename(birds / part / "cow")
    assert _read(birds).class_names == ("ant", "bee", "cow")
    assert before.train.images[np.array([0])].shape == (1, 6, 5, 3)  # who has opened an old one keeps it


def test_a_folder_that_cannot_be_written_has_its_cache_in_the_data_folder(
    birds: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    place, source = _prepare(birds), Folder(birds)
    assert place.parent.parent == birds.parent / "data" and place.parent.name.startswith("folder-birds-")
    assert _prepare(birds) == place and not (birds / CACHE).exists()
    os.utime(birds / "train" / "ant" / "0.png", ns=(1, 1))  # as on another host, which shares the data folder
    other = _prepare(birds)
    assert other != place and source.read(place).digest == source.read(other).digest


@pytest.mark.parametrize("damage", ["a pixel", "no sums"])
def test_a_damaged_cache_is_made_again(birds: Path, damage: str) -> None:
    source, expected, place = Folder(birds), _read(birds).digest, _prepare(birds)
    if damage == "a pixel":
        content = bytearray((place / IMAGES).read_bytes())
        content[17] ^= 1
        (place / IMAGES).write_bytes(content)
    else:
        (place / SUMS).unlink()
    (place.parent / f".{place.name}.part").mkdir()  # a killed process has left it
    assert _prepare(birds) == place and source.read(place).digest == expected
    assert [path.name for path in place.parent.iterdir() if path.is_dir()] == [place.name]


def test_all_unusable_images_are_named_at_once(birds: Path) -> None:
    images = sorted(birds.rglob("*.png"))
    for image in images[3:7]:
        image.write_bytes(b"text")
    images[7].unlink()
    os.mkfifo(images[7])  # reading it would block for ever
    with pytest.raises(UserError) as caught:
        _read(birds)
    message = str(caught.value)
    assert all(f"{image} (cannot identify image file" in message for image in images[3:7]), message
    assert f"{images[7]} (it is no regular file)" in message and "\n" not in message
    assert not [path for path in (birds / CACHE).iterdir() if path.is_dir()]
    with pytest.raises(UserError, match="it is no regular file"):
        read_image(images[7], 3)


def test_what_is_left_out_is_counted_in_one_line(birds: Path) -> None:
    shutil.copytree(birds / "test", birds / "val")
    (birds / "unlabelled").mkdir()
    (birds / "train" / ".hidden").mkdir()  # no class
    _save(birds / "train" / "ant" / ".ipynb_checkpoints" / "0-checkpoint.png", _pixels(1))
    for name in ("1.heic", "2.HEIC", "notes.txt", ".hidden.png", "README"):
        (birds / "train" / "ant" / name).write_bytes(b"x")
    shutil.copy(birds / "train" / "ant" / "0.png", birds / "train" / "0.png")
    with Image.open(birds / "train" / "ant" / "0.png") as image:
        image.save(birds / "train" / "ant" / "9.gif")
        image.save(birds / "train" / "ant" / "9.jfif", "JPEG")
    said: list[str] = []
    assert len(_read(birds, Onlooker(is_warned=said.append)).train) == 14
    assert said == [
        f"note: --dataset folder:{birds}: left out: val/ (test/ is used), unlabelled/, 2 .heic, 1 .txt, "
        "2 hidden, 1 outside the folders of classes, 1 without an extension"
    ]


def test_a_full_disk_is_told_and_keeps_nothing(birds: Path) -> None:
    with full_disk(400), pytest.raises(UserError, match=r"cannot write \S+: File too large: free space"):
        _read(birds)
    assert [path.name for path in (birds / CACHE).iterdir()] in ([], [".lock"])
