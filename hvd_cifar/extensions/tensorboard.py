"""What TensorBoard shows of a run besides the scalars of speed and accuracy, named as in TensorFlow's tutorial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from hvd_cifar import fields
from hvd_cifar.fields import MOST_STEPS
from hvd_cifar.training.callbacks import Callback, Run, StepObserver

if TYPE_CHECKING:
    import keras

    from hvd_cifar.data.pipeline import MicroBatch

IMAGES = 10
_NAMES = {"kernel": "weights", "bias": "biases"}  # Keras's names, and those of TensorFlow's tutorial


class Settings(fields.Settings):
    """Options of this extension."""

    summary_every: int | None = Field(
        None,
        ge=0,
        le=MOST_STEPS,
        description="Steps between histograms and images for TensorBoard, beside those of the first step; 0: none. "
        "[default: as --eval-every]",
    )


def make(run: Run) -> Callback:
    """The summaries."""
    return Summaries(run.options(Settings).summary_every)


class Summaries(Callback):
    """Shows a run in TensorBoard, with the names of TensorFlow's CIFAR-10 tutorial. Rank 0 writes.

    It writes the graph at the start, and losses at each log line. After the first step and every --summary-every steps
    it writes a summary: histograms of the variables and of the reduced gradients, and images as the net gets them.
    """

    def __init__(self, every: int | None) -> None:
        """`every`: of --summary-every."""
        self.every = every
        self.record: Record | None = None  # copies the gradients of a step
        self.asked_step = 0  # the step whose gradients are copied

    def on_build(self, run: Run) -> None:
        """Add copies of the gradients to the step."""
        if self.every != 0:
            self.record = Record(run.model.trainable_variables)
            run.observe(self.record)

    def on_start(self, run: Run) -> None:
        """Ask for the first summary."""
        self._ask(run)

    def on_step(self, run: Run) -> None:
        """Show the graph, once it is traced, and a summary of the step where one is due."""
        if self.record and self.record.graph and run.reporter.begins_events:
            run.reporter.show(run.step, [], self.record.graph.as_graph_def().SerializeToString())
            run.reporter.begins_events = False
        if self.asked_step == run.step:
            self._show(run)
        self._ask(run)

    def on_log(self, run: Run) -> None:
        """Show the losses of the last step."""
        from hvd_cifar.reporting import board

        if run.progress.losses:
            run.reporter.show(run.step, [board.scalars(run.progress.losses._asdict())])

    def on_rollback(self, run: Run) -> None:
        """Cancel the summary that was asked for, and ask again."""
        if self.record:
            self.record.ask(False)
        self.asked_step = 0
        self._ask(run)

    def _ask(self, run: Run) -> None:
        """Have the next step recorded where a summary is due after it."""
        every = run.plan.evaluation_steps if self.every is None else self.every
        following = run.step + 1
        if self.record and (following == 1 or (every and following % every == 0)):
            self.record.ask()
            self.asked_step = following

    def _show(self, run: Run) -> None:
        """Show a summary of the last step."""
        from hvd_cifar.reporting import board

        assert self.record is not None, "it was asked"
        gradients = self.record.take()
        if run.world.is_root:
            variables = run.model.trainable_variables
            found = {_tag(v): v.numpy() for v in variables}
            found |= {f"{_tag(v)}/gradients": gradient for v, gradient in zip(variables, gradients, strict=True)}
            pixels = _images(run.progress.micro_batches[-1], run.data.class_names)
            words = "A training image as the net gets it, its values stretched to black and white."
            run.reporter.show(run.step, [board.histograms(found), board.images(pixels, words)])


def _tag(variable: keras.Variable) -> str:
    layer, _, name = variable.path.rpartition("/")
    return f"{layer}/{_NAMES.get(name, name)}"


def _images(batch: MicroBatch, class_names: tuple[str, ...]) -> dict[str, NDArray[np.uint8]]:
    """Up to `IMAGES` images of a micro-batch, each of a different class, by tags that name the class."""
    import tensorflow as tf

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


class Record(StepObserver):
    """Copies the reduced gradients of the steps that `ask` marks.

    A variable on the host switches copying inside the one graph, so marked and other steps compute the same bits.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        """`variables`: whose gradients are copied."""
        import tensorflow as tf

        with tf.device("/CPU:0"):  # where the graph reads it without waiting for a GPU
            self._is_asked = tf.Variable(False, trainable=False, name="record")
        empty = tf.zeros([0])
        self._copies = [tf.Variable(empty, shape=tf.TensorShape(None), trainable=False) for _ in variables]
        self.graph: Any = None  # of the step, once it is traced

    def ask(self, asked: bool = True) -> None:
        """Set whether the next steps are copied."""
        self._is_asked.assign(asked)

    def on_reduced(self, gradients: Sequence[Any]) -> None:
        """Copy the gradients that the optimizer applies."""
        import tensorflow as tf

        def copy() -> None:
            for place, gradient in zip(self._copies, gradients, strict=True):
                place.assign(tf.cast(gradient, tf.float32))

        self.graph = tf.compat.v1.get_default_graph()
        tf.cond(self._is_asked, copy, lambda: None)

    def take(self) -> list[NDArray[Any]]:
        """The copied gradients, in the variables' order. Copying stops."""
        found = [v.numpy() for v in self._copies]
        self.ask(False)
        for variable in self._copies:
            variable.assign([])  # frees memory
        return found
