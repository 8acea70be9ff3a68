"""confusion.json after each evaluation on the test set: the matrix and the worst mistakes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvd_cifar.training.callbacks import Callback, Run

if TYPE_CHECKING:
    from hvd_cifar.training.confusion import Confusion
    from hvd_cifar.training.evaluate import Evaluation


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
        try:
            found.write(run.run_dir, run.data, run.step)
        except OSError as failure:
            run.warn(f"note: cannot write {failure.filename or run.run_dir}: {failure.strerror}")
