"""The file of the confusion matrix and the worst mistakes of an evaluation."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.extensions.confusion import ConfusionWriter
from hvd_cifar.files import read_json
from hvd_cifar.training.evaluate import Confusion, Evaluation, Mistake


@pytest.mark.parametrize(("channels", "size", "shown"), [(1, (5, 7), (5, 7)), (3, (1200, 800), (256, 171))])
def test_the_file_holds_each_mistake_and_its_image_which_readers_can_take(
    channels: int, size: tuple[int, int], shown: tuple[int, int], tmp_path: Path
) -> None:
    images = np.random.default_rng(1).integers(0, 256, (2, *size, channels), np.uint8)
    run: Any = mock.Mock(run_dir=tmp_path, step=40, files_may_fail=lambda what: mock.MagicMock())
    run.data, run.ranks.on_root = Dataset.from_arrays(images, np.arange(2), images, np.arange(2)), lambda act: act()
    found = Confusion(np.array([[1, 1], [0, 2]]), [Mistake(2.5, 1, 0, 1, [0.2, 0.8])])
    ConfusionWriter().on_evaluation(run, Evaluation(0.5, 1.0, 2, 0.5, 1, found))
    content = read_json(tmp_path / "confusion.json")
    assert (content["step"], content["class_names"], content["matrix"]) == (40, ["0", "1"], [[1, 1], [0, 2]])
    (mistake,) = content["mistakes"]
    kind, _, text = mistake.pop("image").partition(",")
    assert kind == "data:image/png;base64"
    assert mistake == {"index": 1, "label": 0, "predicted": 1, "probabilities": [0.2, 0.8]}
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))
    assert pixels.shape[:2] == shown
    assert channels == 3 or (pixels == images[1, ..., 0]).all()
