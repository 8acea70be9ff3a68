"""Pictures of many sizes: how they are scaled, what training, evaluation, `predict` and `export` see of them."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hvd_cifar.data import augment
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.folder import CACHE, Folder, list_images
from hvd_cifar.data.host_files import NOBODY, Onlooker
from hvd_cifar.data.pictures import (
    ATTEMPTS,
    CROP_DRAWS,
    MOST_MARGIN,
    Pictures,
    Size,
    crop_boxes,
    decode,
    head,
    middle,
    read_image,
    scaled,
    with_margin,
)
from hvd_cifar.data.pipeline import training_batches
from hvd_cifar.data.sampler import Sampler
from hvd_cifar.errors import UserError
from tests import pictures

SIZE = (64, 64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pictures of each class in each format."""
    path = tmp_path_factory.mktemp("pictures") / "shapes"
    pictures.fill(path, 3 * len(pictures.CLASSES) * len(pictures.KINDS))
    return path


def _read(path: Path, size: Size | None = SIZE, most: int = 0, onlooker: Onlooker = NOBODY) -> Dataset:
    source = Folder(path, size, most)
    return source.read(source.prepare(path.parent / "data", onlooker))


sides = st.integers(1, 3000)


@given(sides, sides, st.integers(1, 300), st.integers(1, 300))
def test_the_middle_is_scaled_evenly_and_what_is_around_it_is_kept(h: int, w: int, high: int, wide: int) -> None:
    for side, other, part, across, span in zip(
        (h, w), (w, h), (high, wide), (wide, high), scaled((h, w), (high, wide)), strict=True
    ):
        cut = max(1, min(side, other * part // across))
        step = cut / part
        assert 0 <= span.low < span.high <= side + 1e-9
        assert np.isclose((span.high - span.low) / span.length, step)
        margin = (span.length - part) // 2
        assert span.length == part + 2 * margin and np.isclose(span.low + margin * step, (side - cut) // 2)
        assert margin == MOST_MARGIN * part or side - (span.high - span.low) <= 1 + 2 * step


def test_evaluation_and_predict_see_the_same_pixels(folder: Path) -> None:
    dataset = _read(folder)
    images = np.concatenate([dataset.train.images[:], dataset.test.images[:]])
    assert len(images) == 3 * len(pictures.CLASSES) * len(pictures.KINDS)
    for (path, *_), image in zip(list_images(folder).images, images, strict=True):
        assert np.array_equal(image, read_image(path, 3, SIZE)), path
        assert image.std() > 8, path  # no picture is lost in its conversion


def test_export_sees_them_to_rounding(folder: Path) -> None:
    """Where an image is scaled up, or down from all of its pixels; a large JPEG is decoded smaller."""
    for path in sorted(folder.rglob("*.*")):
        if CACHE in str(path) or path.suffix in (".jpg", ".jpeg"):
            continue
        for size in (SIZE, (48, 96), (200, 160)):
            whole = decode(path, 3)
            exported = augment.fit(whole[None], (*size, 3), is_scaled=True).numpy()[0]
            apart = np.abs(exported - read_image(path, 3, size))
            # Pillow rounds and clips between rows and columns, which shows at sharp edges.
            assert apart.max() <= 8 and apart.mean() < 0.1, (path, size, apart.max(), apart.mean())


def test_a_large_jpeg_is_reduced_before_it_is_decoded(tmp_path: Path) -> None:
    image = pictures.draw(0, 1600, 1201, random.Random(4))
    for name, orientation in (("a.jpg", 1), ("b.jpg", 6), ("c.jpg", 3)):
        tags = Image.Exif()
        tags[0x0112] = orientation
        image.save(tmp_path / name, quality=95, exif=tags)
        exact = augment.fit(decode(tmp_path / name, 3)[None], (*SIZE, 3), is_scaled=True).numpy()[0]
        apart = np.abs(exact - read_image(tmp_path / name, 3, SIZE))
        assert 0 < apart.mean() < 1.5, name  # not the same arithmetic, but the same picture at the same place
        assert head(tmp_path / name).size == ((1600, 1201) if name == "b.jpg" else (1201, 1600))  # type: ignore[union-attr]


def test_formats_keep_their_picture(tmp_path: Path) -> None:
    """All of one drawing: turned, with a palette, transparent, of 16 bits, or in the colours of print."""
    drawn = pictures.draw(1, 150, 110, random.Random(8))
    plain = np.asarray(drawn).astype(int)
    for kind in pictures.KINDS:
        found = decode(pictures.save(drawn.copy(), tmp_path / kind, kind), 3).astype(int)
        wanted = np.asarray(drawn.convert("L"))[..., None] if kind in ("deep", "grey") else plain
        assert found.shape == plain.shape and np.abs(found - wanted).mean() < 6, kind


def test_many_sizes_are_refused_with_a_proposal(folder: Path) -> None:
    with pytest.raises(
        UserError, match=r"have 2\d\d sizes \(.*\): give --image-size (96|128), .* takes \d+ MB"
    ) as caught:
        _read(folder, None)
    assert "\n" not in str(caught.value)
    (proposed,) = re.findall(r"--image-size (\d+), .*takes (\d+) MB", str(caught.value))
    size, memory = map(int, proposed)
    _read(folder, (size, size))
    (file,) = (folder / CACHE).glob(f"*-{size}x{size}/images.bin")
    assert round(file.stat().st_size / 1e6) == memory


def test_each_size_has_a_cache_and_many_digests(folder: Path) -> None:
    one, other = _read(folder, (40, 40)), _read(folder, (40, 48))
    assert one.image_shape == (40, 40, 3) and other.image_shape == (40, 48, 3)
    assert one.train.digest != other.train.digest != one.test.digest
    assert _read(folder, (40, 40)).digest == one.digest
    held = one.hold_out(20, 3)
    assert held.train.digest != one.train.digest and held.validation is not None
    assert np.array_equal(held.validation.images[:], one.train.images[held.validation.numbers])
    for small in (one, other):  # they are shifted
        assert not any(augment.transforms(name, small).crops for name in ("standard", "fast"))


def test_crops_have_the_areas_and_proportions_of_the_common_recipe() -> None:
    draws = np.random.default_rng(0).random((20_000, CROP_DRAWS), np.float32)
    top, left, high, wide = crop_boxes(np.array([[1000, 1000]] * 20_000), SIZE, draws).T
    area, ratio = high * wide / 1e6, wide / high
    assert 0.079 < area.min() < 0.082 and 0.9 < area.max() <= 1
    assert 0.745 < ratio.min() < 0.76 and 1.32 < ratio.max() < 1.34
    assert abs((area < 0.31).mean() - 0.27) < 0.04  # evenly spread, but for the largest, which often do not fit
    assert top.min() == left.min() == 0 and abs((top / np.maximum(1, 1000 - high)).mean() - 0.5) < 0.02
    for sizes in np.random.default_rng(1).integers(8, 400, (500, 40, 2)):
        top, left, high, wide = crop_boxes(sizes, SIZE, draws[:40]).T
        assert (np.minimum(top, left) >= 0).all() and (np.minimum(high, wide) > 0).all()
        assert (top + high <= sizes[:, 0]).all() and (left + wide <= sizes[:, 1]).all()


def test_training_cuts_parts_and_none_of_them_depends_on_the_ranks(folder: Path) -> None:
    dataset = _read(folder)
    transforms = augment.transforms("standard", dataset)
    assert transforms.crops and transforms.shape == (64, 64, 3)

    def seen(ranks: int, epoch: int = 0) -> dict[int, np.ndarray[Any, Any]]:
        found: dict[int, np.ndarray[Any, Any]] = {}
        for rank in range(ranks):
            sampler = Sampler(len(dataset.train), 24, 5, rank, ranks)
            steps = -(-len(dataset.train) // 24)
            for batch in training_batches(
                dataset.train, transforms, sampler, first_step=epoch * steps, last_step=(epoch + 1) * steps
            ):
                found |= {
                    int(n): image
                    for n, image, w in zip(batch.example, batch.image.numpy(), batch.weight, strict=True)
                    if w
                }
        return found

    one, three, later = seen(1), seen(3), seen(2, epoch=1)
    assert sorted(one) == sorted(three) == list(range(len(dataset.train)))
    assert all(np.array_equal(one[n], three[n]) for n in one)
    plain = transforms.test(dataset.train.images[:])
    for other in (later, plain):
        assert sum(np.array_equal(one[n], other[n]) for n in one) <= 2  # of one colour


def test_a_crop_shows_its_part_of_the_picture(folder: Path) -> None:
    images = _read(folder).train.images.images
    assert isinstance(images, Pictures)
    draws = np.zeros((1, CROP_DRAWS), np.float32)
    draws[0, :ATTEMPTS] = 0.3
    draws[0, ATTEMPTS : 2 * ATTEMPTS] = 3 / 7  # square
    draws[0, -2:] = 0.999
    whole = images.rows(7)
    side = round((whole.shape[0] * whole.shape[1] * (0.08 + 0.92 * 0.3)) ** 0.5)
    corner = Image.fromarray(whole[-side:, -side:]).resize(SIZE, Image.Resampling.BILINEAR)
    found = images.crops(np.array([7]), draws)[0].astype(int)
    assert np.abs(found - np.asarray(corner)).mean() < 2
    assert np.array_equal(images[np.array([7])][0], middle(whole, SIZE))
    assert min(whole.shape[:2]) == with_margin(SIZE)[0] == 73


def test_grey_pictures_have_one_channel(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "grey" / name).mkdir(parents=True)
        for kind in ("deep", "grey"):
            pictures.save(pictures.draw(2, 80, 75, random.Random(1)), tmp_path / "grey" / name / kind, kind)
    dataset = _read(tmp_path / "grey", (32, 32))
    assert dataset.image_shape == (32, 32, 1) and len(dataset.train) == len(dataset.test) == 2
    crops = dataset.train.images.crops(np.array([0, 1]), np.full((2, CROP_DRAWS), 0.4, np.float32))
    assert crops.shape == (2, 32, 32, 1) and crops.std() > 5


def test_a_tenth_is_held_out_where_there_is_no_test(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    dataset = _read(folder, onlooker=Onlooker(is_warned=said.append))
    count = 3 * len(pictures.KINDS)
    assert np.bincount(dataset.test.labels).tolist() == [-(-count // 10)] * 4
    assert np.bincount(dataset.train.labels).tolist() == [count - -(-count // 10)] * 4
    total = 4 * -(-count // 10)
    assert said == [
        f"note: --dataset folder:{folder}: it has no test/: {total} of {4 * count} images, a tenth of each "
        "class, are the test set"
    ]
    copy = tmp_path / "shapes"
    shutil.copytree(folder, copy / "Train", ignore=shutil.ignore_patterns(CACHE))
    before = {image for image in list_images(copy).images if image.is_test}
    shutil.copy(copy / "Train" / "disc" / "00000.jpg", copy / "Train" / "disc" / "new.jpg")
    after = {image for image in list_images(copy).images if image.is_test}
    assert len(before) == total and len(before ^ after) <= 2  # a new picture moves hardly any other


def test_as_many_unreadable_pictures_as_allowed_are_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "shapes"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(CACHE))
    cut, empty = sorted(p for p in (copy / "disc").iterdir() if p.suffix == ".jpg")[:2]
    cut.write_bytes(cut.read_bytes()[:800])
    empty.write_bytes(b"")
    with pytest.raises(UserError, match="leave them out with --max-unreadable 2") as caught:
        _read(copy, most=1)
    assert str(cut) in str(caught.value) and str(empty) in str(caught.value)
    for _ in range(2):  # also from the cache
        said: list[str] = []
        dataset = _read(copy, most=2, onlooker=Onlooker(is_warned=said.append))
        assert len(dataset.train) + len(dataset.test) == 3 * len(pictures.CLASSES) * len(pictures.KINDS) - 2
        assert "2 left out since they cannot be read: " in said[-1] and f"{empty} (cannot identify" in said[-1]
    for image, label in zip(dataset.train.images[:5], dataset.train.labels[:5], strict=True):
        assert label == 0 and image.std() > 8
    with pytest.raises(UserError, match=f"cannot use {cut}"):
        _read(copy)
    paths = [image.path for image in list_images(copy).images if image.path not in (cut, empty)]
    for path, image in zip(paths, dataset.train.images[:60], strict=False):
        assert np.array_equal(image, read_image(path, 3, SIZE)), path
