"""What a data set is: what `from_arrays` takes and refuses, its statistics, and its digest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hvd_cifar.data import dataset as module
from hvd_cifar.data.dataset import Dataset, Examples, channel_statistics
from hvd_cifar.errors import UserError


def _images(count: int = 7, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(0, 256, (count, *(shape or (5, 4, 3)))).astype(np.uint8)


def _dataset(**changed: Any) -> Dataset:
    given = {
        "train_images": _images(7),
        "train_labels": [0, 1, 2, 0, 1, 2, 0],
        "test_images": _images(3),
        "test_labels": [3, 0, 1],
    }
    return Dataset.from_arrays(**{**given, **changed})


def test_arrays_are_a_data_set() -> None:
    dataset = _dataset(name="things")
    assert (dataset.name, dataset.image_shape, dataset.classes) == ("things", (5, 4, 3), 4)  # a class of the test part
    assert len(dataset.train) == 7 and dataset.train.labels.dtype == np.int32
    assert (dataset.test.images[np.array([2, 0])] == _images(3)[[2, 0]]).all()
    assert _dataset(class_names=["a", "b", "c", "d", "e"]).classes == 5


def test_class_names_are_text_without_control_characters() -> None:
    names = _dataset(class_names=np.array(["1", "2", "3", "4"])).class_names
    assert names == ("1", "2", "3", "4") and all(type(name) is str for name in names)
    dataset = _dataset(name="a\tb", class_names=["\x1b[31mred", "two\nlines", "é", 4])
    assert (dataset.name, dataset.class_names) == ("a\\tb", ("\\x1b[31mred", "two\\nlines", "é", "4"))


def test_grey_images_are_of_one_channel() -> None:
    assert len(_dataset(train_images=_images(7, 6, 5, 4), test_images=_images(3, 6, 5, 4)).channel_mean) == 4
    assert _dataset(train_images=_images(7, 6, 5), test_images=_images(3, 6, 5, 1)).image_shape == (6, 5, 1)


def test_tensors_are_taken() -> None:
    import tensorflow as tf

    images, labels = tf.constant(_images(7)), tf.constant([0, 1, 2, 0, 1, 2, 0])
    assert _dataset(train_images=images, train_labels=labels[:, None]).digest == _dataset().digest
    with pytest.raises(UserError, match="the training images are float32"):
        _dataset(train_images=tf.cast(images, tf.float32))


def test_images_stay_on_the_disk(tmp_path: Path) -> None:
    np.save(tmp_path / "images.npy", _images(7))
    mapped = np.load(tmp_path / "images.npy", mmap_mode="r+")
    dataset = _dataset(train_images=mapped)
    mapped[3] = 9
    assert (dataset.train.images[np.array([3])] == 9).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_images": [[1]]}, "the training images are a list: give a NumPy array of uint8"),
        ({"train_images": _images(7).astype(np.float32)}, "the training images are float32: give .* 0 to 255"),
        ({"train_images": _images(0), "train_labels": np.zeros(0, int)}, "the training images are empty"),
        ({"test_images": _images(3, 5, 5, 3)}, "training images are 5 x 4 x 3 and test images 5 x 5 x 3"),
        ({"train_labels": [0] * 6}, "the training part has 7 images but 6 labels"),
        ({"train_labels": [0.0] * 7}, r"the training labels are float64 of shape \[7\]: give integers"),
        ({"train_labels": np.eye(7, dtype=int)}, r"the training labels are int64 of shape \[7, 7\]"),
        ({"test_labels": [0, 2, -1]}, "the test label of example 2 is -1"),
        ({"test_labels": [0, 2**40, 1]}, f"the test label of example 1 is {2**40}"),
        (
            {"train_images": _images(7, 3, 32, 32)},
            r"the training images have the shape \[7, 3, 32, 32\], channels first",
        ),
        ({"train_labels": [0] * 7, "test_labels": [0] * 3}, "all labels are 0: give examples of two or more classes"),
        ({"class_names": ["a", "b", "c"]}, "label 3 has no name, since class_names names 3 classes"),
    ],
)
def test_what_is_no_data_set_is_refused_in_one_line(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"data set arrays: {message}") as caught:
        _dataset(**changed)
    assert "\n" not in str(caught.value) and re.search(": (give|name|put) ", str(caught.value))


def test_statistics_are_those_of_all_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    images = _images(50, 6, 5, 3)
    images[..., 1] = 77
    monkeypatch.setattr(module, "CHUNK_BYTES", 6 * 5 * 3 * 8)  # 50 is no multiple of 8 images
    mean, deviation = channel_statistics(images)
    pixels = images.reshape(-1, 3).astype(np.float64)
    assert np.allclose(mean, pixels.mean(axis=0), rtol=1e-12)
    assert np.allclose(deviation, [pixels[:, 0].std(), 1, pixels[:, 2].std()], rtol=1e-12)  # none to divide by


def test_the_digest_is_of_every_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _dataset().digest
    by_plane = _images(7).transpose(0, 3, 1, 2).copy().transpose(0, 2, 3, 1)  # whatever the order in memory
    assert _dataset(name="other", train_images=by_plane).digest == whole  # and of nothing else
    for part, count in (("train", 7), ("test", 3)):
        images, labels = _images(count), np.arange(count) % 4
        other = {f"{part}_labels": labels}
        base = _dataset(**other).digest
        images[-1, -1, -1, -1] ^= 1
        labels = labels.copy()
        labels[-1] ^= 1
        assert len({base, _dataset(**other, **{f"{part}_images": images}).digest}) == 2
        assert _dataset(**{f"{part}_labels": labels}).digest != base
    monkeypatch.setattr(module, "CHUNK_BYTES", 5 * 4 * 3 * 2)
    assert _dataset().digest == whole


def test_held_out_examples_keep_their_labels_and_numbers() -> None:
    whole = _dataset()
    parts = whole.hold_out(3, seed=5)
    assert parts.validation is not None and (len(parts.train), len(parts.validation)) == (4, 3)
    for part in (parts.train, parts.validation):
        assert part.numbers is not None and part.images.shape == (len(part), *whole.train.images.shape[1:])
        assert (part.images[:] == whole.train.images[part.numbers]).all()
        assert (part.images[np.array([2, 0])] == whole.train.images[part.numbers[[2, 0]]]).all()
        assert (part.labels == whole.train.labels[part.numbers]).all()
    assert parts.test is whole.test and parts.channel_mean == whole.channel_mean
    with pytest.raises(UserError, match="--hold-out 7: the training set has 7 examples: hold out fewer"):
        whole.hold_out(7, seed=5)


def test_the_digest_of_examples_is_fixed_for_ever() -> None:
    """Runs record it: a run that is resumed under a later version finds its own data."""
    examples = Examples(
        (np.arange(2 * 5 * 4 * 3) % 251).astype(np.uint8).reshape(2, 5, 4, 3), np.array([7, 9], np.int32)
    )
    assert examples.digest == "4e6c6f2ef9184e810af7c7f4d8df401ea0518c2712efd7dd8a1e9d76a1f90020"


class _Source:
    """Images one at a time, as grain's and array_record's sources give them."""

    def __init__(self, images: NDArray[Any], digest: str = "") -> None:
        self.images, self.digest, self.read = images, digest, 0

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        return self.images[number]


def test_images_may_come_from_a_source_by_index() -> None:
    images = _images(7)
    whole, found = _dataset(), _dataset(train_images=_Source(images))
    assert found.digest == whole.digest and found.channel_mean == whole.channel_mean
    assert (found.train.images[np.array([5, 0, 5])] == images[[5, 0, 5]]).all()
    assert (found.hold_out(3, 5).train.images[:] == whole.hold_out(3, 5).train.images[:]).all()
    message = r"image 6 of a _Source is uint8 of shape .3, 4, 3., and the first one's is .5, 4, 3."
    with pytest.raises(UserError, match=message):
        _dataset(train_images=_Source([*images[:6], images[6, :3]]))  # type: ignore[arg-type]


def test_a_source_s_digest_stands_for_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_MEASURED", 4)
    source = _Source(_images(7), "v1")
    found = _dataset(train_images=source)
    read = source.read
    assert read <= 1 + 4  # the first for its shape, and some to measure
    assert (
        found.train.digest == _dataset(train_images=_Source(_images(7) ^ 1, "v1")).train.digest and source.read == read
    )
    assert found.train.digest != _dataset(train_images=_Source(_images(7), "v2")).train.digest
