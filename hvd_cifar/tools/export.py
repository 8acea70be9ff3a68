"""`export`: write a trained net, with its preprocessing of images, as a SavedModel and a .keras file."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvd_cifar import __version__
from hvd_cifar.data import augment
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import PART, replace_text
from hvd_cifar.models.portable import portable
from hvd_cifar.reporting import terminal
from hvd_cifar.tools.settings import ExportSettings
from hvd_cifar.training.evaluate import logits_of
from hvd_cifar.training.run_dir import read_summary
from hvd_cifar.training.trained import Trained, load

SAVED_MODEL, KERAS, METADATA = "saved_model", "model.keras", "metadata.json"


def export(settings: ExportSettings) -> None:
    """Write a run's net into the folder of --to, whole or not at all.

    Raises:
        UserError: where there is no such run or checkpoint, the folder has files or cannot be written, or the net has
            a layer that TensorFlow alone cannot load.
    """
    # os.path, since methods of Path raise for a name that is too long.
    if os.path.exists(settings.to) and not (os.path.isdir(settings.to) and not os.listdir(settings.to)):
        raise UserError(f"--to {settings.to}: exists; give an empty folder, or one that does not exist")
    trained = load(settings)
    try:
        model = usable(trained)
    except UserError as failure:
        raise UserError(f"--model {trained.settings.model}: {failure}") from None
    part = settings.to.with_name(f".{settings.to.name}.{secrets.token_hex(4)}{PART}")  # another process may export too
    try:
        part.mkdir(parents=True)
        named = with_names(model, trained.dataset.labels_in_words)
        named.save(part / KERAS)
        named.export(part / SAVED_MODEL, verbose=False)
        replace_text(part / METADATA, json.dumps(_metadata(trained, settings.run_dir), indent=2) + "\n")
        os.replace(part, settings.to)
    except (OSError, tf.errors.OpError) as failure:
        raise UserError(f"--to {settings.to}: {reason_of(failure)}; give a folder that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    terminal.say(f"step {trained.step} of {settings.run_dir}: {SAVED_MODEL}/, {KERAS}, {METADATA} in {settings.to}")


def usable(trained: Trained) -> keras.Model:
    """A model of Keras's own layers and operations only, which TensorFlow alone can load.

    Returns:
        A model from images uint8 [b, any height, any width, channels] to a dictionary of `logits` and `probabilities`,
        float32 [b, classes], in the order of the labels.

    Raises:
        UserError: where there can be none.
    """
    transforms, shape = trained.transforms, trained.dataset.image_shape
    if transforms.portable is None:
        raise UserError("TensorFlow cannot load the Transforms of its recipe: set their `portable` (docs/use.md)")
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    images = keras.Input((None, None, shape[2]), dtype="uint8", name="images")
    fitted = augment.fit(images, shape, is_scaled=trained.settings.image_size is not None)
    seen = transforms.portable(fitted)
    logits = logits_of(portable(trained.model, transforms.shape), seen, trained.six_views)
    return keras.Model(images, {"logits": logits, "probabilities": keras.ops.softmax(logits)}, name="classifier")


def with_names(model: keras.Model, names: Sequence[str]) -> keras.Model:
    """The model with a third output, `class_names`: strings [b, classes]."""
    labels = keras.ops.zeros_like(model.output["logits"], "int64") + np.arange(len(names))
    unknown = max(names, key=len) + "?"  # the name of no class
    lookup = keras.layers.StringLookup(vocabulary=list(names), num_oov_indices=0, oov_token=unknown, invert=True)
    return keras.Model(model.inputs[0], {**model.output, "class_names": lookup(labels)}, name=model.name)


def _metadata(trained: Trained, run_dir: Path) -> dict[str, Any]:
    views = 6 if trained.six_views else 1
    # --checkpoint may be of another run.
    summary = read_summary(run_dir) if trained.checkpoint.resolve().is_relative_to(run_dir.resolve()) else {}
    is_same = (summary.get("steps"), summary.get("test_views")) == (trained.step, views)
    return {
        "run": str(run_dir),
        "checkpoint": trained.checkpoint.name,
        "step": trained.step,
        "model": trained.settings.model,
        "test_accuracy": summary["test_accuracy"] if is_same else None,
        "test_views": views,
        "dataset": trained.dataset.name,
        "examples_sha256": trained.facts.get("examples_sha256"),
        "image_shape": trained.dataset.image_shape,
        "class_names": trained.dataset.labels_in_words,
        "versions": {"hvd_cifar": __version__, "tensorflow": tf.__version__, "keras": keras.__version__},
    }
