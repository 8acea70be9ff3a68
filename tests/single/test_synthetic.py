"""The embedded data set: the same bytes everywhere, balanced, and out of reach of a linear model."""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from hvd_cifar.config import DataSettings, make
from hvd_cifar.data import download, synthetic
from hvd_cifar.data.download import DownloadError
from hvd_cifar.data.place import Onlooker
from hvd_cifar.data.source import prepare
from hvd_cifar.data.synthetic import LAYOUT
from hvd_cifar.errors import UserError

# Of the six files one after the other. A change of the drawing needs a new name, or results of the same name could no
# longer be compared.
MD5 = {"synthetic-v2": "c829d6d2a91882896b08d1f678c826f9"}

Pixels = NDArray[np.float32]


class Arrays(NamedTuple):
    """A split of the set, in memory."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int32]


def ensure(data_dir: Path) -> Path:
    return prepare(make(DataSettings, {"dataset": "synthetic", "data_dir": data_dir}))[1]


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Drawn by two processes at once."""
    data_dir = tmp_path_factory.mktemp("synthetic")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        folders = pool.map(ensure, [data_dir] * 2, chunksize=1)
    assert folders == [data_dir / LAYOUT.folder] * 2
    yield data_dir
    shutil.rmtree(data_dir)


@pytest.fixture(scope="module")
def sets(data_dir: Path) -> tuple[Arrays, Arrays]:
    dataset = LAYOUT.read(data_dir / LAYOUT.folder)
    train, test = dataset.train, dataset.test
    return Arrays(train.images[:], train.labels), Arrays(test.images[:], test.labels)


def test_every_machine_draws_these_bytes(data_dir: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    for name in LAYOUT.files:
        digest.update((data_dir / LAYOUT.folder / name).read_bytes())
    assert digest.hexdigest() == MD5[LAYOUT.folder]
    names = (data_dir / LAYOUT.folder / "batches.meta.txt").read_text().split()
    assert names == ["disc", "ring", "square", "frame", "triangle", "plus", "cross", "bars", "pillars", "checker"]


def test_nothing_else_is_left(data_dir: Path) -> None:
    assert {path.name for path in data_dir.iterdir()} <= {LAYOUT.folder, ".lock"}


def test_it_is_drawn_once(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "draw_file", lambda number: pytest.fail("drew it again"))
    assert ensure(data_dir) == data_dir / LAYOUT.folder


def test_classes_are_balanced_and_mixed(sets: tuple[Arrays, Arrays]) -> None:
    files = [*sets[0].labels.reshape(5, 10_000), sets[1].labels]
    for of_file in files:
        assert np.bincount(of_file).tolist() == [len(of_file) // 10] * 10
        # 1,000 neighbours hold about 100 of each class, with a standard deviation of 9.
        assert (np.abs([np.bincount(part, minlength=10) - 100 for part in of_file.reshape(-1, 1000)]) < 50).all()
    assert len({of_file[:1000].tobytes() for of_file in files}) == 6  # each file has an order of its own


def test_no_image_comes_twice(sets: tuple[Arrays, Arrays]) -> None:
    train, test = sets
    assert len({image.tobytes() for image in (*train.images, *test.images)}) == 51_000


def test_the_mean_says_nothing_of_the_class(sets: tuple[Arrays, Arrays]) -> None:
    train, _ = sets
    colours = train.images.reshape(50_000, -1, 3).mean(axis=1, dtype=np.float64)
    of_class = np.array([colours[train.labels == label].mean(axis=0) for label in range(10)])
    # As far apart as the means of 5,000 images drawn at random would be.
    assert (np.abs(of_class - colours.mean(axis=0)) < 4 * colours.std(axis=0) / 5000**0.5).all()


def inputs(images: NDArray[np.uint8], remove_mean: bool) -> Pixels:
    """All pixels as float32 [n, 3072] about zero; less each image's own mean, if asked."""
    pixels = images.reshape(len(images), -1).astype(np.float32)
    return pixels - (pixels.mean(axis=1, keepdims=True) if remove_mean else np.float32(127.5))


def softmax_regression(train: Arrays, test: Arrays, *, remove_mean: bool, epochs: int) -> float:
    """Test accuracy of a linear classifier of standardised pixels: momentum 0.9, a rate that falls to zero."""
    deviation = inputs(train.images[:5000], remove_mean).std(axis=0)
    random, batch = np.random.default_rng(0), 500
    weights, speed = np.zeros((2, 3073, 10), np.float32)  # the last row is the bias

    def features(images: NDArray[np.uint8]) -> Pixels:
        pixels = inputs(images, remove_mean) / deviation
        return np.concatenate([pixels, np.ones((len(pixels), 1), np.float32)], axis=1)

    for epoch in range(epochs):
        order = random.permutation(len(train.labels))
        for rows in order.reshape(-1, batch):
            x = features(train.images[rows])
            logits = x @ weights
            errors = np.exp(logits - logits.max(axis=1, keepdims=True))
            errors /= errors.sum(axis=1, keepdims=True)
            errors[np.arange(batch), train.labels[rows]] -= 1
            speed = 0.9 * speed + x.T @ errors / batch
            weights -= 0.002 * (1 - epoch / epochs) * speed
    return float(((features(test.images) @ weights).argmax(axis=1) == test.labels).mean())


@pytest.mark.parametrize("remove_mean", [False, True])
def test_a_linear_model_stays_under_60_percent(sets: tuple[Arrays, Arrays], remove_mean: bool) -> None:
    train = Arrays(sets[0].images[:20_000], sets[0].labels[:20_000])
    accuracy = softmax_regression(train, sets[1], remove_mean=remove_mean, epochs=4)
    print(f"linear model, remove_mean={remove_mean}: test accuracy {accuracy:.4f}")
    assert accuracy < 0.60


def test_the_linear_model_learns_what_a_linear_model_can(sets: tuple[Arrays, Arrays]) -> None:
    """The control of the test above: a faint stripe whose place tells the class, added to every image."""
    train, test = (Arrays(examples.images[:10_000].copy(), examples.labels[:10_000]) for examples in sets)
    for images, labels in (train, test):
        stripe = np.arange(32) // 3 == labels[:, None]
        images += np.minimum(255 - images, 30) * stripe[:, :, None, None].astype(np.uint8)
    assert softmax_regression(train, test, remove_mean=True, epochs=5) > 0.80


def named(name: str, data_dir: Path, warn: Callable[[str], None]) -> tuple[str, Path]:
    settings = make(DataSettings, {"dataset": name, "data_dir": data_dir, "data_url": NOBODY})
    source, folder = prepare(settings, Onlooker(is_warned=warn))
    return source.name, folder


def test_prepare_by_name(data_dir: Path) -> None:
    assert named("synthetic", data_dir, pytest.fail) == ("synthetic", data_dir / LAYOUT.folder)
    dataset = LAYOUT.read(data_dir / LAYOUT.folder)
    assert (dataset.name, dataset.classes, dataset.image_shape) == ("synthetic", 10, (32, 32, 3))
    assert dataset.class_names == tuple(synthetic.FIGURES)


NOBODY = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # the discard port: nobody listens there


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(download, "WAITS", ())


@pytest.mark.usefixtures("offline")
def test_auto_falls_back_with_a_warning(data_dir: Path) -> None:
    warnings: list[str] = []
    assert named("auto", data_dir, warnings.append) == ("synthetic", data_dir / LAYOUT.folder)
    assert len(warnings) == 1
    assert "NOT CIFAR-10" in warnings[0] and NOBODY in warnings[0] and "\n" not in warnings[0]


@pytest.mark.usefixtures("offline")
def test_cifar10_does_not_fall_back(data_dir: Path) -> None:
    with pytest.raises(DownloadError, match=NOBODY):
        named("cifar10", data_dir, pytest.fail)


def test_a_damaged_file_is_named_not_drawn_again(tmp_path: Path) -> None:
    folder = tmp_path / LAYOUT.folder
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"short")
    with pytest.raises(UserError, match="data_batch_1.bin has 5 bytes"):
        ensure(tmp_path)


def test_what_is_in_its_place_is_named(tmp_path: Path) -> None:
    (tmp_path / LAYOUT.folder).mkdir()
    (tmp_path / LAYOUT.folder / LAYOUT.names_file).touch()
    with pytest.raises(UserError, match=f"{LAYOUT.folder} is there, but has no data_batch_1.bin: move it away"):
        ensure(tmp_path)


def test_what_a_killed_process_left_is_no_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".unfinished").mkdir()
    (tmp_path / ".unfinished" / "data_batch_1.bin").write_bytes(b"half")
    blank = {number: np.zeros((1000 if number == 5 else 10_000, 3073), np.uint8) for number in range(6)}
    monkeypatch.setattr(synthetic, "draw_file", blank.get)
    folder = ensure(tmp_path)
    LAYOUT.check(folder)
    assert not (tmp_path / ".unfinished").exists()
    shutil.rmtree(folder)
