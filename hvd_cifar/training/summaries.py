"""What TensorBoard shows of a run besides the scalars of speed and accuracy."""

from __future__ import annotations

import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.config import DEFAULT_SUMMARY_EVERY
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.data.pipeline import MicroBatch
from hvd_cifar.distributed import collectives
from hvd_cifar.reporting import board
from hvd_cifar.reporting.metrics import Reporter
from hvd_cifar.training.callbacks import Callback
from hvd_cifar.training.evaluate import Evaluation
from hvd_cifar.training.progress import Progress, Run
from hvd_cifar.training.record import Record
from hvd_cifar.training.run_dir import COURSE, numbers_of

SHARE = 0.02  # limit of the share of time that summaries take, without --summary-every
TOWERS = 8  # number of ranks, from rank 0 on, whose activations are shown
IMAGES = 10
MOST_CLASSES = 200  # of a confusion matrix that is drawn: a larger picture would be unreadable
_NAMES = {"kernel": "weights", "bias": "biases"}  # Keras's names, and those of TensorFlow's tutorial


class Summaries(Callback):
    """Shows a run in TensorBoard, with the names of TensorFlow's CIFAR-10 tutorial. Rank 0 writes.

    It writes hyperparameters and the graph at the start, losses at each log line, and the confusion matrix of each
    evaluation. After the first step and every --summary-every steps it writes a summary: histograms of the variables,
    of the reduced gradients and of each rank's activations, the activations' sparsity, and images as the net gets them.
    """

    def __init__(self, progress: Progress, record: Record | None, dataset: Dataset, reporter: Reporter) -> None:
        """`record`: copies gradients and activations of a step; None with --summary-every 0."""
        self.progress = progress
        self.record = record
        self.dataset = dataset
        self.reporter = reporter
        self.asked_step = 0  # the step whose gradients and activations are copied
        self.seconds = 0.0  # that the last summary took
        self.ended = 0.0

    def on_start(self, run: Run) -> None:
        """Show the hyperparameters."""
        self.ended = time.perf_counter()
        if self.reporter.begins_events:
            values = {name: getattr(run.settings, name) for name in (*COURSE, "learning_rate", "epochs")}
            values |= numbers_of(run.settings, run.recipe)
            values |= {name: getattr(run.plan, name) for name in ("learning_rate_factor", "warmup_epochs")}
            values |= {"dataset": run.dataset, "ranks": run.world.size, "batch": run.plan.global_batch_size}
            self.reporter.show(run.step, [board.hyperparameters(values, run.run_dir.name)])
        self._ask(run)

    def on_step(self, run: Run) -> None:
        """Show the graph, once it is traced, and a summary of the step where one is due."""
        if self.record and self.record.graph and self.reporter.begins_events:
            self.reporter.show(run.step, [], self.record.graph.as_graph_def().SerializeToString())
            self.reporter.begins_events = False
        if self.asked_step == run.step:
            self._show(run)
        self._ask(run)

    def on_log(self, run: Run) -> None:
        """Show the losses of the last step, and their moving averages."""
        last, average = self.progress.losses, self.progress.average_losses
        if last and average:
            raw = {f"{name} (raw)": value for name, value in last._asdict().items()}
            self.reporter.show(run.step, [board.scalars(raw | average._asdict())])

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Show the confusion matrix."""
        if evaluation.confusion is not None and self.dataset.classes <= MOST_CLASSES:
            matrix = evaluation.confusion.matrix.tolist()
            self.reporter.show(run.step, board.confusion(matrix, self.dataset.class_names))

    def on_rollback(self, run: Run) -> None:
        """Cancel the summary that was asked for, and ask again."""
        if self.record:
            self.record.ask(False)
        self.asked_step = 0
        self._ask(run)

    def _ask(self, run: Run) -> None:
        """Have the next step recorded where a summary is due after it."""
        every = run.settings.summary_every
        following = run.step + 1
        if not self.record or (following > 1 and following % (every or DEFAULT_SUMMARY_EVERY)):
            return
        if every is None:  # rank 0's clock decides for all ranks
            is_due = SHARE * (time.perf_counter() - self.ended) >= self.seconds
            if not collectives.broadcast_object(is_due):
                return
        self.record.ask()
        self.asked_step = following

    def _show(self, run: Run) -> None:
        """Show a summary of the last step. A collective."""
        assert self.record is not None, "it was asked"
        self.progress.check_losses()  # waits for the device: steps in progress do not count as time of the summary
        began = time.perf_counter()
        gradients, activations = self.record.take()
        own = {name: (board.histogram(v), float(np.mean(v == 0))) for name, v in activations.items()}
        towers = collectives.all_gather_object(own if run.world.rank < TOWERS else {})
        if run.world.is_root:
            variables = run.model.trainable_variables
            found = {_tag(v): board.histogram(v.numpy()) for v in variables}
            found |= {f"{_tag(v)}/gradients": board.histogram(g) for v, g in zip(variables, gradients, strict=True)}
            sparsity = {}
            for rank, tower in enumerate(towers):
                for name, (buckets, zeros) in tower.items():
                    found[f"tower_{rank}/{name}/activations"] = buckets
                    sparsity[f"tower_{rank}/{name}/sparsity"] = zeros
            pixels = _images(self.progress.micro_batches[-1], self.dataset.class_names)
            shown = board.images(
                pixels, "A training image as the net gets it, its values stretched to black and white."
            )
            self.reporter.show(run.step, [board.histograms(found), board.scalars(sparsity), shown])
        self.ended = time.perf_counter()
        self.seconds = self.ended - began


def _tag(variable: keras.Variable) -> str:
    layer, _, name = variable.path.rpartition("/")
    return f"{layer}/{_NAMES.get(name, name)}"


def _images(batch: MicroBatch, class_names: tuple[str, ...]) -> dict[str, NDArray[np.uint8]]:
    """Up to `IMAGES` images of a micro-batch, each of a different class, by tags that name the class."""
    labels = batch.label.numpy()[batch.weight.numpy() > 0]
    classes, places = np.unique(labels, return_index=True)
    images = tf.gather(batch.image, places[:IMAGES]).numpy()
    names = class_names or [str(number) for number in range(int(classes.max(initial=0)) + 1)]
    return {f"images/{names[c]}": _visible(image) for c, image in zip(classes, images, strict=False)}


def _visible(image: NDArray[Any]) -> NDArray[np.uint8]:
    """float [height, width, channels] -> uint8 [height, width, 1 or 3], scaled so that values range from 0 to 255."""
    shown = image if image.shape[-1] == 3 else image[..., :1]
    low, high = shown.min(), shown.max()
    return ((shown - low) * (255 / max(high - low, 1e-12))).round().astype(np.uint8)
