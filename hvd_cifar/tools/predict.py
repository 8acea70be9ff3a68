"""`predict`: classify image files with a trained net."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data import augment
from hvd_cifar.data.folder import images_below
from hvd_cifar.data.pictures import read_image
from hvd_cifar.errors import UserError, printable
from hvd_cifar.files import complain
from hvd_cifar.reporting import terminal
from hvd_cifar.tools.settings import PredictSettings
from hvd_cifar.training.evaluate import examples_at_once, logits_of
from hvd_cifar.training.trained import Trained, load

SHOWN = 3  # classes of each image


def predict(settings: PredictSettings) -> int:
    """Print a line for each image, with the most probable classes; of one that cannot be read, why.

    Returns the number of these. Raises UserError where there is no such run or checkpoint, or a folder has no images.
    """
    files = [file for place in settings.images for file in images_in(place)]
    trained = load(settings)
    channels = trained.dataset.image_shape[2]
    if channels not in (1, 3):
        raise UserError(f"{settings.run_dir}: images have {channels} channels; an image file has 1 or 3")
    unread, names = 0, trained.dataset.labels_in_words
    at_once = examples_at_once(trained.dataset.image_shape, trained.transforms.shape)
    for first in range(0, len(files), at_once):
        images: list[tuple[Path, NDArray[np.uint8]]] = []
        for file in files[first : first + at_once]:
            try:
                image = read_image(file, channels, trained.settings.image_size)
                images.append((file, _fitting(image, trained.dataset.image_shape)))
            except UserError as failure:
                complain(printable(str(failure)))
                unread += 1
        rows = probabilities(trained, np.stack([image for _, image in images])) if images else ()
        for (file, _), row in zip(images, rows, strict=True):
            classes = [(names[i], float(row[i])) for i in np.argsort(-row, kind="stable")]
            terminal.say(as_json(file, classes) if settings.as_json else as_text(file, classes))
    return unread


def images_in(place: Path) -> list[Path]:
    """A file itself, or the images below a folder, by path. UserError where it has none, or cannot be read."""
    if not os.path.isdir(place):  # Path.is_dir may raise
        return [place]
    try:
        if found := sorted(images_below(place)):
            return found
    except OSError as failure:
        raise UserError(f"{failure.filename}: {failure.strerror}; give images that can be read") from None
    raise UserError(f"{place}: the folder has no images; give image files, or a folder of them")


def probabilities(trained: Trained, images: NDArray[np.uint8]) -> NDArray[np.floating[Any]]:
    """The probabilities [b, classes] of images uint8 [b, height, width, channels] of the data set's size."""
    seen = keras.ops.convert_to_tensor(trained.transforms.test(images))
    logits = logits_of(trained.model, seen, trained.six_views)
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.softmax(logits)))


def _fitting(image: NDArray[np.uint8], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    return np.asarray(keras.ops.convert_to_numpy(augment.fit(image[np.newaxis], shape))[0], np.uint8)


def as_text(image: Path, classes: Sequence[tuple[str, float]]) -> str:
    """A line with the most probable classes. Names come from a data set, and the path from a folder: both untrusted."""
    return f"{printable(str(image))}: " + ", ".join(f"{printable(name)} {p:.1%}" for name, p in classes[:SHOWN])


def as_json(image: Path, classes: Sequence[tuple[str, float]]) -> str:
    """All classes of an image, as an object."""
    found = [{"class": name, "probability": round(p, 6)} for name, p in classes]
    return json.dumps({"image": str(image), "classes": found})
