"""What TensorBoard shows of a run besides the scalars of speed and accuracy, named as in TensorFlow's tutorial."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    from hvd_cifar.training.evaluate import Evaluation

SUMMARY_EVERY = 100  # steps, unless the user gives another number
SHARE = 0.02  # limit of the share of time that summaries take, without --summary-every
TOWERS = 8  # number of ranks, from rank 0 on, whose activations are shown
IMAGES = 10
MOST_CLASSES = 200  # of a confusion matrix that is drawn: a larger picture would be unreadable
EXAMPLES = 32  # of a micro-batch whose activations are copied: a layer has a million values for 32 CIFAR-10 images
_NAMES = {"kernel": "weights", "bias": "biases"}  # Keras's names, and those of TensorFlow's tutorial


class Settings(fields.Settings):
    """Options of this extension."""

    summary_every: int | None = Field(
        None,
        ge=0,
        le=MOST_STEPS,
        description="Steps between histograms and images for TensorBoard, beside those of the first step; 0: none. "
        f"[default: {SUMMARY_EVERY}; more where they would take over 2% of the time]",
    )


def make(run: Run) -> Callback:
    """The summaries."""
    return Summaries(run.options(Settings).summary_every)


class Summaries(Callback):
    """Shows a run in TensorBoard, with the names of TensorFlow's CIFAR-10 tutorial. Rank 0 writes.

    It writes hyperparameters and the graph at the start, losses at each log line, and the confusion matrix of each
    evaluation. After the first step and every --summary-every steps it writes a summary: histograms of the variables,
    of the reduced gradients and of each rank's activations, the activations' sparsity, and images as the net gets them.
    """

    def __init__(self, every: int | None) -> None:
        """`every`: of --summary-every."""
        self.every = every
        self.record: Record | None = None  # copies gradients and activations of a step
        self.asked_step = 0  # the step whose gradients and activations are copied
        self.seconds = 0.0  # that the last summary took
        self.ended = 0.0

    def on_build(self, run: Run) -> None:
        """Add copies of gradients and activations to the step."""
        if self.every != 0:
            self.record = Record(run.model)
            run.observe(self.record)

    def on_start(self, run: Run) -> None:
        """Show the hyperparameters."""
        from hvd_cifar.reporting import board
        from hvd_cifar.training.record import MUST_MATCH, numbers_of

        self.ended = time.perf_counter()
        if run.reporter.begins_events:
            values = {name: getattr(run.settings, name) for name in (*MUST_MATCH, "learning_rate", "epochs")}
            values |= numbers_of(run.settings, run.recipe)
            values |= {name: getattr(run.plan, name) for name in ("learning_rate_factor", "warmup_epochs")}
            values |= {"dataset": run.dataset, "ranks": run.world.size, "batch": run.plan.global_batch_size}
            run.reporter.show(run.step, [board.hyperparameters(values, run.run_dir.name)])
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
        """Show the losses of the last step, and their moving averages."""
        from hvd_cifar.reporting import board

        last, average = run.progress.losses, run.progress.average_losses
        if last and average:
            raw = {f"{name} (raw)": value for name, value in last._asdict().items()}
            run.reporter.show(run.step, [board.scalars(raw | average._asdict())])

    def on_evaluation(self, run: Run, evaluation: Evaluation) -> None:
        """Show the confusion matrix."""
        from hvd_cifar.reporting import board

        if evaluation.confusion is not None and run.data.classes <= MOST_CLASSES:
            matrix = evaluation.confusion.matrix.tolist()
            run.reporter.show(run.step, board.confusion(matrix, run.data.class_names))

    def on_rollback(self, run: Run) -> None:
        """Cancel the summary that was asked for, and ask again."""
        if self.record:
            self.record.ask(False)
        self.asked_step = 0
        self._ask(run)

    def _ask(self, run: Run) -> None:
        """Have the next step recorded where a summary is due after it."""
        every = self.every
        following = run.step + 1
        if not self.record or (following > 1 and following % (every or SUMMARY_EVERY)):
            return
        if every is None:  # rank 0's clock decides for all ranks
            is_due = SHARE * (time.perf_counter() - self.ended) >= self.seconds
            if not run.ranks.broadcast(is_due):
                return
        self.record.ask()
        self.asked_step = following

    def _show(self, run: Run) -> None:
        """Show a summary of the last step. A collective."""
        from hvd_cifar.reporting import board

        assert self.record is not None, "it was asked"
        run.progress.check_losses()  # waits for the device: steps in progress do not count as time of the summary
        began = time.perf_counter()
        gradients, activations = self.record.take()
        own = {name: (board.histogram(v), float(np.mean(v == 0))) for name, v in activations.items()}
        towers = run.ranks.gather(own if run.world.rank < TOWERS else {})
        if run.world.is_root:
            variables = run.model.trainable_variables
            found = {_tag(v): board.histogram(v.numpy()) for v in variables}
            found |= {f"{_tag(v)}/gradients": board.histogram(g) for v, g in zip(variables, gradients, strict=True)}
            sparsity = {}
            for rank, tower in enumerate(towers):
                for name, (buckets, zeros) in tower.items():
                    found[f"tower_{rank}/{name}/activations"] = buckets
                    sparsity[f"tower_{rank}/{name}/sparsity"] = zeros
            pixels = _images(run.progress.micro_batches[-1], run.data.class_names)
            shown = board.images(
                pixels, "A training image as the net gets it, its values stretched to black and white."
            )
            run.reporter.show(run.step, [board.histograms(found), board.scalars(sparsity), shown])
        self.ended = time.perf_counter()
        self.seconds = self.ended - began


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
    """Copies the reduced gradients and the activations of the steps that `ask` marks.

    A variable on the host switches copying inside the one graph, so marked and other steps compute the same bits.
    """

    def __init__(self, model: keras.Model) -> None:
        """`model`: built. The step calls `self.model` instead, which also returns activations (`_with_activations`)."""
        import tensorflow as tf

        self.model, names = _with_activations(model)
        with tf.device("/CPU:0"):  # where the graph reads it without waiting for a GPU
            self._is_asked = tf.Variable(False, trainable=False, name="record")
        self._gradients = [_empty() for _ in model.trainable_variables]
        self._activations = {name: _empty() for name in names}
        self.graph: Any = None  # of the net's forward and backward pass, once it is traced

    def ask(self, asked: bool = True) -> None:
        """Set whether the next steps are copied."""
        self._is_asked.assign(asked)

    def on_reduced(self, gradients: Sequence[Any]) -> None:
        """Copy the gradients that the optimizer applies."""
        self._keep(self._gradients, lambda: gradients)

    def forward(self, model: Any, images: Any) -> Any:
        """The logits; copies of the activations are made beside them."""
        import tensorflow as tf

        self.graph = tf.compat.v1.get_default_graph()
        outputs = self.model(images, training=True)
        logits, *activations = outputs if isinstance(outputs, list) else [outputs]
        found = [tf.stop_gradient(output[:EXAMPLES]) for output in activations]
        self._keep(list(self._activations.values()), lambda: found)
        return logits

    def _keep(self, places: Sequence[Any], tensors: Callable[[], Sequence[Any]]) -> None:
        import tensorflow as tf

        def copy() -> None:
            for place, tensor in zip(places, tensors(), strict=True):
                place.assign(tf.cast(tensor, tf.float32))

        tf.cond(self._is_asked, copy, lambda: None)

    def take(self) -> tuple[list[NDArray[Any]], dict[str, NDArray[Any]]]:
        """The copied gradients, in the variables' order, and activations, by layer. Copying stops."""
        found = [v.numpy() for v in self._gradients], {name: v.numpy() for name, v in self._activations.items()}
        self.ask(False)
        for variable in (*self._gradients, *self._activations.values()):
            variable.assign([])  # frees memory
        return found


def _empty() -> Any:
    import tensorflow as tf

    return tf.Variable(tf.zeros([0]), shape=tf.TensorShape(None), trainable=False)


def _with_activations(model: keras.Model) -> tuple[keras.Model, list[str]]:
    """The model with the outputs of its activation layers beside its logits.

    Returns:
        A model of the same layers from images to [logits, *outputs], and a name for each output: the layer's, without
        the suffix `_relu`, as in TensorFlow's tutorial. The logits are also among the outputs. Where the model is not a
        graph of layers, `model` itself and no names.
    """
    import keras

    if not type(model).__module__.startswith("keras.") or not getattr(model, "inputs", None):
        return model, []  # a user's class, whose `call` may do more than its layers
    logits = model.outputs[0]
    outputs = {layer.name.removesuffix("_relu"): layer.output for layer in model.layers if _is_activation(layer)}
    outputs[model.layers[-1].name] = logits
    ones = [output[0] if isinstance(output, (list, tuple)) else output for output in outputs.values()]
    try:
        return keras.Model(model.inputs[0], [logits, *ones], name=model.name, dtype=model.dtype_policy), list(outputs)
    except ValueError:  # a layer that is part of another net first
        return model, []


def _is_activation(layer: keras.layers.Layer) -> bool:
    import keras

    from hvd_cifar.models.activation import QuickGelu, QuickRelu

    names = ("Activation", "ELU", "LeakyReLU", "PReLU", "ReLU")
    kinds = (*(getattr(keras.layers, name) for name in names), QuickGelu, QuickRelu)
    linear = keras.activations.linear
    return isinstance(layer, kinds) or getattr(layer, "activation", linear) not in (None, linear)
