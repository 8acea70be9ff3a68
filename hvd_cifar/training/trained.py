"""A trained run: its settings and its net at a checkpoint, without reading its data set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar import fields, models
from hvd_cifar.config import TrainSettings
from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import UserError
from hvd_cifar.models import Model
from hvd_cifar.models.portable import finish_all
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.training import checkpoint, user_code, user_files
from hvd_cifar.training.plan import changed, precision_of, resolve, set_precision
from hvd_cifar.training.record import described_data
from hvd_cifar.training.run_dir import recorded, settings_of_run
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.work import transforms_of
from hvd_cifar.use_settings import RunSettings


@dataclass
class Trained:
    """A run's net, as evaluation uses it.

    Attributes:
        settings: the run's, resolved.
        recipe: its model's, with the run's changes.
        facts: the "run" section of config.json.
        dataset: the run's data set, without examples.
        model: from images as the transforms make them to logits [b, classes].
        transforms: from the data set's images to what the net sees.
        state: what is read from a checkpoint.
        averages: of the weights, if the run keeps them.
        checkpoint: of the weights, once they are read.
    """

    settings: TrainSettings
    recipe: Recipe
    facts: dict[str, Any]
    dataset: Dataset
    model: keras.Model
    transforms: Transforms
    state: TrainState
    averages: MovingAverage | None = None
    checkpoint: Path = Path()

    @property
    def step(self) -> int:
        """Of the weights."""
        return int(self.state.step.numpy())

    @property
    def six_views(self) -> bool:
        """Whether logits are the average of six views of an image."""
        return self.recipe.test_time_augmentation

    def finish(self, path: Path) -> None:
        """Make the net ready, once the state has the values of a checkpoint."""
        self.checkpoint = path
        finish_all(self.model)
        if self.averages:
            self.averages.swap()

    def read(self, path: Path) -> None:
        """Load a checkpoint on all ranks. A collective.

        Raises:
            UserError: where it cannot be read, or is of another net.
        """
        collectives.on_root(lambda: checkpoint.restore(self.state, path, partial=True))
        self.state.broadcast()
        self.finish(path)


def rebuild(settings: TrainSettings, model: Model, run_dir: Path) -> Trained:
    """The net of a run with its initial weights, without the run's data set.

    Args:
        settings: from `find` or `settings_of`.
        model: that these name.

    Raises:
        UserError: where the record lacks the data set, or the model cannot be built.
    """
    facts = recorded(run_dir / "config.json")["run"]
    dataset = described_data(facts, run_dir)
    set_precision("float32", settings.seed)
    model = models.with_recipe(model, dataset.image_shape, dataset.classes)
    assert model.recipe is not None, "it was asked for"
    recipe = changed(model.recipe.for_batch(settings.global_batch_size or 0), settings)
    settings = resolve(settings, recipe)
    transforms = transforms_of(settings, recipe, dataset)
    set_precision(precision_of(settings), settings.seed)
    net = models.build(model, transforms.shape, dataset.classes)
    state, averages = TrainState(net.model), None
    if recipe.ema_decay:
        averages = MovingAverage(net.model.trainable_variables, recipe.ema_decay)
        state.add_core("averages", averages.variables)
    return Trained(settings, recipe, facts, dataset, net.model, transforms, state, averages)


def load(settings: RunSettings) -> Trained:
    """Load the net of a run in a single process, without the run's data set.

    Raises:
        UserError: where there is no such run, checkpoint or net.
    """
    if (launched_size() or 1) > 1:
        raise UserError("a launcher started this command several times; it runs in one process: call it once")
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # leave memory to a run that may be training there
    values, path = find(settings, needs_data=False)
    user_code.use_copies(user_files.of_trained(settings.run_dir, [settings.model or ""]))
    name = values.model
    model = models.BUILT_IN.get(name) or Model(name, user_code.load_alone(name, "--model"))
    trained = rebuild(values, model, settings.run_dir)
    checkpoint.restore(trained.state, path, partial=True)
    trained.finish(path)
    return trained


def find(settings: RunSettings, needs_data: bool) -> tuple[TrainSettings, Path]:
    """The run's settings, overridden by those given in `settings`, and the path of the checkpoint.

    Raises:
        UserError: where there is no such run or checkpoint.
    """
    names = ("model", "dataset", "data_dir")
    changes = {name: v for name in names if (v := getattr(settings, name, None)) is not None}
    changes["hold_out"] = None  # only the test set is evaluated
    if settings.test_time_augmentation is not None:
        changes["set"] = {"test_time_augmentation": settings.test_time_augmentation}
    if not needs_data:
        changes["dataset"] = "auto"
    values = settings_of(settings.run_dir, **changes)
    path = checkpoint.find(settings.checkpoint or settings.run_dir)
    if path is None:
        raise UserError(f"{settings.checkpoint or settings.run_dir}: there is no checkpoint; give --checkpoint PATH")
    return values, path


def settings_of(run_dir: Path, **changes: Any) -> TrainSettings:
    """The settings of a run for an evaluation, with changes by name. Raises UserError where there is no run."""
    path = run_dir / "config.json"
    if not os.path.exists(path):  # unlike Path.exists, False where a folder may not be read
        raise UserError(f"{run_dir}: there is no run (no config.json); give the folder of a run")
    then = recorded(path)
    changes = {"virtual_shards": None, "gradient_accumulation": 1, "callbacks": (), **changes}
    changes["set"] = {**then.get("set", {}), "image_scales": None, **changes.get("set", {})}
    if not str(changes.get("dataset", then.get("dataset"))).startswith(fields.FOLDER_DATASET):
        changes["image_size"] = None  # of another set that is evaluated
    return settings_of_run(path, **changes)
