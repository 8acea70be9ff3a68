"""`export`: write a trained net, with its preprocessing of images, as a SavedModel; and its weights."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar import __version__
from hvd_cifar.data import augment
from hvd_cifar.errors import UserError, reason_of
from hvd_cifar.files import PART, replace_text
from hvd_cifar.models import finish_all
from hvd_cifar.reporting import terminal
from hvd_cifar.tools.settings import ExportSettings
from hvd_cifar.training.evaluate import logits_of
from hvd_cifar.training.run_dir import read_summary
from hvd_cifar.training.trained import Trained, load

SAVED_MODEL, WEIGHTS, METADATA = "saved_model", "model.weights.h5", "metadata.json"


def export(settings: ExportSettings) -> None:
    """Write a run's net into the folder of --to, whole or not at all.

    Raises:
        UserError: where there is no such run or checkpoint, the folder has files or cannot be written, or TensorFlow
            alone cannot prepare the images.
    """
    # os.path, since methods of Path raise for a name that is too long.
    if os.path.exists(settings.to) and not (os.path.isdir(settings.to) and not os.listdir(settings.to)):
        raise UserError(f"--to {settings.to}: exists; give an empty folder, or one that does not exist")
    trained = load(settings)
    part = settings.to.with_name(f".{settings.to.name}.{secrets.token_hex(4)}{PART}")  # another process may export too
    try:
        part.mkdir(parents=True)
        trained.model.save_weights(part / WEIGHTS)  # first: `save` changes the net's layers
        save(trained, part / SAVED_MODEL)
        replace_text(part / METADATA, json.dumps(_metadata(trained, settings.run_dir), indent=2) + "\n")
        os.replace(part, settings.to)
    except (OSError, tf.errors.OpError) as failure:
        raise UserError(f"--to {settings.to}: {reason_of(failure)}; give a folder that can be written") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
    terminal.say(f"step {trained.step} of {settings.run_dir}: {SAVED_MODEL}/, {WEIGHTS}, {METADATA} in {settings.to}")


def classifier(trained: Trained) -> Callable[[Any], dict[str, Any]]:
    """A run's net and its preprocessing of images, by operations that every program with TensorFlow has.

    It computes in the type of the net's weights. The layers of the run's net change.

    Returns:
        A function, also for a graph, from images uint8 [b, any height, any width, channels] to `logits` and
        `probabilities`, float32 [b, classes], and `class_names`, strings [b, classes], in the order of the labels.

    Raises:
        UserError: where the run's transforms are Python alone.
    """
    transforms, shape, net = trained.transforms, trained.dataset.image_shape, trained.model
    prepare = transforms.portable
    if prepare is None:
        named = f"--model {trained.settings.model}"
        raise UserError(f"{named}: TensorFlow cannot load its recipe's Transforms: set their `portable` (docs/use.md)")
    for layer in net._flatten_layers():
        layer.dtype_policy = layer.variable_dtype
        if hasattr(layer, "plain"):
            layer.plain = True
    finish_all(net)

    def classify(images: Any) -> dict[str, Any]:
        fitted = augment.fit(images, shape, is_scaled=trained.settings.image_size is not None)
        logits = tf.cast(logits_of(net, prepare(fitted), trained.six_views), tf.float32)
        names = tf.tile([trained.dataset.labels_in_words], [tf.shape(images)[0], 1])
        return {"logits": logits, "probabilities": tf.nn.softmax(logits), "class_names": names}

    return classify


def save(trained: Trained, folder: Path) -> None:
    """Write a run's `classifier` as a SavedModel. OSError or TensorFlow's error where the folder cannot be written."""
    images = tf.TensorSpec([None, None, None, trained.dataset.image_shape[2]], tf.uint8, "images")
    archive = keras.export.ExportArchive()
    archive.track(trained.model)
    archive.add_endpoint("serve", classifier(trained), [images])
    archive.write_out(folder, verbose=False)


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
