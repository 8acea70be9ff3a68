"""confusion.json after each evaluation on the test set: the matrix and the worst mistakes."""

from __future__ import annotations

import base64
import io
import json
from typing import TYPE_CHECKING, Any

from hvd_cifar.files import replace_text
from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.evaluate import Evaluation, Mistake

SIDE = 256  # pixels, the longer side of the mistakes' images: with larger ones the file is too large for its readers


def make(run: Run) -> Callback:
    return ConfusionWriter()


class ConfusionWriter(Callback):
    """Writes confusion.json. A file that cannot be written does not end the run."""

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        found, images = evaluation.confusion, run.data.test.images
        if found is None or evaluation.part != "test":
            return

        def described(mistake: Mistake) -> dict[str, Any]:
            image = _data_url(images[[mistake.index]][0])
            return {**{k: v for k, v in vars(mistake).items() if k != "loss"}, "image": image}

        def write() -> None:
            content = {
                "dataset": run.data.name,
                "step": run.step,
                "split": "test",
                "class_names": list(run.data.labels_in_words),
                "matrix": found.matrix.tolist(),
                "mistakes": [described(mistake) for mistake in found.mistakes],
            }
            with run.files_may_fail("confusion.json cannot be written"):
                replace_text(run.run_dir / "confusion.json", json.dumps(content) + "\n")

        run.ranks.on_root(write)


def _data_url(image: Any) -> str:
    """An image uint8 [height, width, channels] as a PNG in a data URL. Without 3 channels, only the first is shown."""
    from PIL import Image

    file = io.BytesIO()
    picture = Image.fromarray(image if image.shape[-1] == 3 else image[..., 0])
    picture.thumbnail((SIDE, SIDE))
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
