"""A trained run: its settings and its net at a checkpoint, without reading its data set."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar import config, models
from hvd_cifar.config import RunSettings, TrainSettings
from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.errors import UserError
from hvd_cifar.models import Model, Net
from hvd_cifar.models.portable import finish_all
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.runtime.environment import launched_size
from hvd_cifar.training import checkpoint, run_dir, user_code, user_files
from hvd_cifar.training.plan import changed, precision_of, resolve, set_precision
from hvd_cifar.training.run_dir import damage_told
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.work import transforms_of


@dataclass(frozen=True)
class Trained:
    """A run's net at a checkpoint, as evaluation uses it.

    Attributes:
        settings: the run's, resolved.
        recipe: its model's, with the run's changes.
        facts: the "run" section of config.json.
        dataset: the run's data set, without examples.
        model: from images as the transforms make them to logits [b, classes].
        transforms: from the data set's images to what the net sees.
        checkpoint, step: of the weights.
    """

    settings: TrainSettings
    recipe: Recipe
    facts: dict[str, Any]
    dataset: Dataset
    model: keras.Model
    transforms: Transforms
    checkpoint: Path
    step: int

    @property
    def six_views(self) -> bool:
        """Whether logits are the average of six views of an image."""
        return self.recipe.test_time_augmentation


def load(settings: RunSettings) -> Trained:
    """Load the net of a run in a single process, without the run's data set.

    Raises:
        UserError: where there is no such run, checkpoint or net.
    """
    if (launched_size() or 1) > 1:
        raise UserError("a launcher started this command several times; it runs in one process: call it once")
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # leave memory to a run that may be training there
    trained, path = find(settings, needs_data=False)
    user_code.use_copies(user_files.copies_of(settings.run_dir, [settings.model or ""]))
    facts = run_dir.recorded(settings.run_dir / "config.json")["run"]
    dataset = run_dir.described(facts, settings.run_dir)
    name = trained.model
    model = models.BUILT_IN.get(name) or Model(name, user_code.load_alone(name, "--model"))
    set_precision("float32", trained.seed)
    model = models.with_recipe(model, dataset.image_shape, dataset.classes)
    assert model.recipe is not None, "it was asked for"
    recipe = changed(model.recipe.for_batch(trained.global_batch_size or 0), trained)
    trained = resolve(trained, recipe)
    transforms = transforms_of(trained, recipe, dataset)
    set_precision(precision_of(trained), trained.seed)
    net = models.build(model, transforms.shape, dataset.classes)
    state, averages = state_of(net, recipe)
    checkpoint.restore(state, path, partial=True)
    if averages:
        averages.swap()
    finish_all(net.model)
    return Trained(trained, recipe, facts, dataset, net.model, transforms, path, int(state.step.numpy()))


def find(settings: RunSettings, needs_data: bool) -> tuple[TrainSettings, Path]:
    """The run's settings, overridden by those given in `settings`, and the path of the checkpoint.

    Raises:
        UserError: where there is no such run or checkpoint.
    """
    values = settings_of(settings.run_dir) | {"hold_out": None}  # only the test set is evaluated
    instead = ("model", "dataset", "data_dir")
    values.update({name: v for name in instead if (v := getattr(settings, name, None)) is not None})
    if settings.test_time_augmentation is not None:
        values["set"] = {**values.get("set", {}), "test_time_augmentation": settings.test_time_augmentation}
    if not needs_data:
        values["dataset"] = "auto"
    path = checkpoint.find(settings.checkpoint or settings.run_dir)
    if path is None:
        raise UserError(f"{settings.checkpoint or settings.run_dir}: there is no checkpoint; give --checkpoint PATH")
    with damage_told(settings.run_dir / "config.json"):
        return config.make(TrainSettings, values), path


def settings_of(run_dir: Path) -> dict[str, Any]:
    """The settings of a run, by name, for an evaluation. Raises UserError where there is no run."""
    recorded = run_dir / "config.json"
    if not os.path.exists(recorded):  # unlike Path.exists, False where a folder may not be read
        raise UserError(f"{run_dir}: there is no run (no config.json); give the folder of a run")
    with damage_told(recorded):
        values = config.read_file(recorded)
    values |= {"virtual_shards": None, "gradient_accumulation": 1}
    values["set"] = {**values.get("set", {}), "image_scales": None}
    return values | {"callbacks": []}


def state_of(net: Net, recipe: Recipe) -> tuple[TrainState, MovingAverage | None]:
    """What an evaluation reads from a checkpoint: the net's weights, and their moving averages if the run has them."""
    state, averages = TrainState(net.model), None
    if recipe.ema_decay:
        averages = MovingAverage(net.model.trainable_variables, recipe.ema_decay)
        state.add_core("averages", averages.variables)
    return state, averages
