"""A trained run: its settings and its net at a checkpoint; the command `evaluate`, on any number of ranks."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar import fields, models
from hvd_cifar.config import EvaluateSettings, RunSettings, TrainSettings
from hvd_cifar.data.augment import Transforms
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.files import complain, replace_text
from hvd_cifar.models import finish_all
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.optim.averages import MovingAverage
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import session
from hvd_cifar.training import checkpoint, user_code
from hvd_cifar.training.evaluate import make_evaluator
from hvd_cifar.training.plan import changed, resolve, set_precision
from hvd_cifar.training.record import described_data
from hvd_cifar.training.run_dir import recorded, settings_of_run
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.work import UserObjects, load_data, model_of, recipe_of, transforms_of


@dataclass
class Trained:
    """A run's net, as evaluation uses it."""

    settings: TrainSettings  # resolved
    recipe: Recipe  # with the run's changes
    facts: dict[str, Any]  # the "run" section of config.json
    dataset: Dataset  # the run's, without examples
    model: keras.Model  # from images as the transforms make them to logits [b, classes]
    transforms: Transforms  # from the data set's images to what the net sees
    state: TrainState  # what is read from a checkpoint
    averages: MovingAverage | None = None  # of the weights, if the run keeps them
    checkpoint: Path = Path()  # of the weights, once they are read

    @property
    def step(self) -> int:
        """Of the weights."""
        return int(self.state.step.numpy())

    @property
    def six_views(self) -> bool:
        """Whether logits are the average of six views of an image."""
        return self.recipe.test_time_augmentation

    def read(self, path: Path) -> None:
        """Load a checkpoint. A collective. UserError where it cannot be read, or is of another net."""
        collectives.on_root(lambda: checkpoint.restore(self.state, path, partial=True))
        if collectives.has_started():
            self.state.broadcast()
        self.checkpoint = path
        finish_all(self.model)
        if self.averages:
            self.averages.swap()


def rebuild(
    settings: TrainSettings, run_dir: Path, given: UserObjects | None = None, own: Sequence[str] = ()
) -> Trained:
    """The net of a run with its initial weights, without the run's data set. A collective.

    `settings` are from `find` or `settings_of`, `own` the specs of objects that the user names instead of the run's.
    UserError where the record lacks the data set, or the model cannot be built.
    """
    user_code.use_copies(collectives.on_root(lambda: user_code.of_trained(run_dir, own)))
    named = model_of(settings, given or UserObjects())

    def build() -> Trained:
        facts = recorded(run_dir / "config.json")["run"]
        dataset = described_data(facts, run_dir)
        set_precision("float32", settings.seed)
        model = models.with_recipe(named, dataset.image_shape, dataset.classes)
        recipe = changed(recipe_of(model).for_batch(settings.global_batch_size or 0), settings)
        resolved = resolve(settings, recipe)
        transforms = transforms_of(resolved, recipe, dataset)
        set_precision(resolved.precision, resolved.seed)
        net = models.build(model, transforms.shape, dataset.classes).model
        state, averages = TrainState(net), None
        if recipe.ema_decay:
            averages = MovingAverage(net.trainable_variables, recipe.ema_decay)
            state.add("averages", averages.variables, core=True)
        return Trained(resolved, recipe, facts, dataset, net, transforms, state, averages)

    return collectives.host_by_host(build)


def load(settings: RunSettings) -> Trained:
    """The net of a run, in a process without Horovod. UserError where there is no such run, checkpoint or net."""
    for gpu in tf.config.list_physical_devices("GPU"):
        tf.config.experimental.set_memory_growth(gpu, True)  # leave memory to a run that may be training there
    values, path = find(settings, needs_data=False)
    trained = rebuild(values, settings.run_dir, own=[settings.model or ""])
    trained.read(path)
    return trained


def find(settings: RunSettings, needs_data: bool) -> tuple[TrainSettings, Path]:
    """The run's settings, overridden by those given in `settings`, and the path of the checkpoint.

    UserError where there is no such run or checkpoint.
    """
    given = {name: getattr(settings, name, None) for name in ("model", "dataset", "data_dir")}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
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


def evaluate_run(settings: EvaluateSettings, given: UserObjects | None = None) -> dict[str, Any]:
    """Evaluate a run's checkpoint on all ranks of this job; rank 0 prints and writes --output.

    UserError where there is no such run or checkpoint, or its data set cannot be found or made; TrainingError where the
    loss is not finite.
    """
    given = given or UserObjects()
    with session() as world:
        has_data = given.dataset is not None
        values, path = collectives.on_root(lambda: find(settings, needs_data=not has_data))
        own = [spec for spec in (settings.model, settings.dataset) if spec is not None]
        trained = rebuild(values, settings.run_dir, given, own)
        trained.read(path)
        any_size = not isinstance(trained.recipe.augmentation, str)
        dataset = as_learnt(load_data(values, world, given.dataset), trained.dataset, any_size)
        is_of_run = not has_data and settings.dataset is None
        if world.is_root and is_of_run and trained.facts["test_sha256"] != dataset.test.digest:
            complain(f"note: {dataset.name}: its test examples are not those of the run")

        evaluate = make_evaluator(trained.model, dataset, trained.transforms, world)
        found = evaluate(trained.six_views)
        if not math.isfinite(found.loss):
            raise TrainingError(f"test loss = {found.loss}: the run had diverged at {path}; give another --checkpoint")
        result: dict[str, Any] = {
            "dataset": dataset.name,
            "model": values.model,
            "checkpoint": str(path),
            "step": trained.step,
            "world_size": world.size,
            **found.summary,
        }
        if world.is_root:
            terminal.say(
                f"{dataset.name}, {values.model}, step {trained.step}: test accuracy {found.accuracy:.2%}, "
                f"test loss {found.loss:.4f}, {found.examples} examples, {world.size} rank{'s' * (world.size > 1)}"
            )
        collectives.on_root(lambda: _write(settings.output, result))
        return result


def _write(output: Path | None, result: dict[str, Any]) -> None:
    try:
        if output:
            replace_text(output, json.dumps(result, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"--output {output}: {failure.strerror}; give a file that can be written") from None


def as_learnt(given: Dataset, learnt: Dataset, any_size: bool) -> Dataset:
    """A set to evaluate, with the classes and channel statistics of the set that the run's net has learnt.

    `any_size`: whether the run's transforms are the user's own, which may take images of any size. UserError where the
    set has images of another size, or other classes.
    """
    known, named = learnt.labels_in_words, given.class_names
    theirs, own = (" x ".join(map(str, one.image_shape)) for one in (given, learnt))
    if theirs != own and not any_size:
        raise UserError(
            f"data set {given.name}: its images are {theirs} and the run's {own} (height x width x channels): "
            "give a set with images of the run's size"
        )
    is_named = bool(named) and known != tuple(map(str, range(learnt.classes)))
    if given.classes > learnt.classes or is_named and named != known[: len(named)]:
        theirs, own = (", ".join(names[:3]) for names in (given.labels_in_words, known))
        raise UserError(
            f"data set {given.name}: its classes ({theirs}, ...) are not the run's, in their order ({own}, ...): "
            "give a set with the same classes"
        )
    names = ("classes", "class_names", "channel_mean", "channel_deviation")
    return replace(given, **{name: getattr(learnt, name) for name in names})
