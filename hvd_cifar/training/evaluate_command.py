"""The `evaluate` command: evaluates a checkpoint of a run on the whole test set, on any number of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import collectives
from hvd_cifar.errors import TrainingError, UserError
from hvd_cifar.files import complain, replace_text
from hvd_cifar.reporting import terminal
from hvd_cifar.runtime.world import session
from hvd_cifar.training import user_code, user_files
from hvd_cifar.training.evaluate import make_evaluator
from hvd_cifar.training.trained import find, rebuild
from hvd_cifar.training.work import UserObjects, load_data, model_of
from hvd_cifar.use_settings import EvaluateSettings


def evaluate_run(settings: EvaluateSettings, given: UserObjects | None = None) -> dict[str, Any]:
    """Evaluate a run's checkpoint on all ranks of this job; rank 0 prints and writes --output.

    Raises:
        UserError: where there is no such run or checkpoint, or its data set cannot be found or made.
        TrainingError: where the loss is not finite.
    """
    given = given or UserObjects()
    with session() as world:
        has_data = given.dataset is not None
        values, path = collectives.on_root(lambda: find(settings, needs_data=not has_data))
        own = [spec for spec in (settings.model, settings.dataset) if spec is not None]
        user_code.use_copies(collectives.on_root(lambda: user_files.of_trained(settings.run_dir, own)))
        model = model_of(values, given)
        trained = collectives.host_by_host(lambda: rebuild(values, model, settings.run_dir))
        trained.read(path)
        any_size = not isinstance(trained.recipe.augmentation, str)
        dataset = as_learnt(load_data(values, world, given.dataset), trained.dataset, any_size)
        is_of_run = not has_data and settings.dataset is None
        if world.is_root and is_of_run and trained.facts["test_sha256"] != dataset.test.digest:
            complain(f"note: {dataset.name}: its test examples are not those of the run")

        evaluate = make_evaluator(trained.model, dataset, trained.transforms, world, settings.batch_size)
        found = evaluate(trained.six_views)
        if not math.isfinite(found.loss):
            raise TrainingError(f"test loss = {found.loss}: the run had diverged at {path}; give another --checkpoint")
        result: dict[str, Any] = {
            "dataset": dataset.name,
            "model": values.model,
            "checkpoint": str(path),
            "step": trained.step,
            "world_size": world.size,
            "test_accuracy": found.accuracy,
            "test_loss": found.loss,
            "test_views": found.views,
            "test_accuracy_of_one_view": found.plain_accuracy,
            "test_examples": found.examples,
        }
        if world.is_root:
            terminal.say(
                f"{dataset.name}, {values.model}, step {trained.step}: test accuracy {found.accuracy:.2%}, "
                f"test loss {found.loss:.4f}, {found.examples} examples, {world.size} rank{'s' * (world.size > 1)}"
            )
        collectives.on_root(lambda: _write(settings.output, result))
        return result


def as_learnt(given: Dataset, learnt: Dataset, any_size: bool) -> Dataset:
    """A set to evaluate, with the classes and channel statistics that the run's net has learnt.

    Args:
        learnt: the run's data set.
        any_size: whether the run's transforms are the user's own, which may take images of any size.

    Raises:
        UserError: where the set has images of another size, or other classes.
    """
    known, named = learnt.labels_in_words, given.class_names
    if given.image_shape != learnt.image_shape and not any_size:
        theirs, own = (" x ".join(map(str, shape)) for shape in (given.image_shape, learnt.image_shape))
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
    return replace(
        given,
        classes=learnt.classes,
        class_names=learnt.class_names,
        channel_mean=learnt.channel_mean,
        channel_deviation=learnt.channel_deviation,
    )


def _write(output: Path | None, result: dict[str, Any]) -> None:
    """Rank 0's file. Raises UserError where it cannot be written."""
    try:
        if output:
            replace_text(output, json.dumps(result, indent=2) + "\n")
    except OSError as failure:
        raise UserError(f"--output {output}: {failure.strerror}; give a file that can be written") from None
