"""confusion.json after each evaluation on the test set: the matrix and the worst mistakes."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvd_cifar.files import replace_text
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.data.dataset import Dataset
    from hvd_cifar.training.confusion import Confusion
    from hvd_cifar.training.evaluate import Evaluation

SIDE = 256  # pixels, the longer side of the mistakes' images: with larger ones the file is too large for its readers


def make(run: Run) -> Callback:
    """The writer."""
    return ConfusionWriter()


class ConfusionWriter(Callback):
    """Writes confusion.json."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Write the file. A file that cannot be written does not end the run."""
        if evaluation.confusion is not None and evaluation.part == "test":
            found = evaluation.confusion
            run.ranks.on_root(lambda: self._write(run, found))

    def _write(self, run: Run, found: Confusion) -> None:
        with run.files_may_fail("confusion.json cannot be written"):
            write(run.run_dir, found, run.data, run.step)


def write(folder: Path, found: Confusion, dataset: Dataset, step: int) -> None:
    """Write confusion.json; `dataset` has the images. Raises OSError where it cannot be written."""
    mistakes = [
        {
            "index": mistake.example,
            "label": mistake.label,
            "predicted": mistake.predicted,
            "probabilities": mistake.probabilities,
            "image": _data_url(dataset.test.images[[mistake.example]][0]),
        }
        for mistake in found.mistakes
    ]
    content = {
        "dataset": dataset.name,
        "step": step,
        "split": "test",
        "class_names": list(dataset.labels_in_words),
        "matrix": found.matrix.tolist(),
        "mistakes": mistakes,
    }
    replace_text(folder / "confusion.json", json.dumps(content) + "\n")


def _data_url(image: Any) -> str:
    """An image uint8 [height, width, channels] as a PNG in a data URL. Without 3 channels, only the first is shown."""
    from PIL import Image

    file = io.BytesIO()
    picture = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    picture.thumbnail((SIDE, SIDE))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
