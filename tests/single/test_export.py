"""What `export` and `predict` make and tell of a run, and which files of a folder are images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

from benchmarks import nets
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.data import augment
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import SyncBatchNormalization, convert_sync_batch_norm
from hvd_cifar.errors import UserError
from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.recipe import Recipe
from hvd_cifar.tools.export import classifier, save
from hvd_cifar.tools.predict import as_json, as_text, images_in
from hvd_cifar.training.state import TrainState
from hvd_cifar.training.trained import Trained

RANDOM = np.random.default_rng(5)


def _trained(model: keras.Model, side: int, transforms: str = "none") -> tuple[Trained, NDArray[np.uint8]]:
    """A run with this net, and test images of it."""
    images = RANDOM.integers(0, 256, (8, side, side, 3), np.uint8)
    dataset = Dataset.from_arrays(images, np.arange(8) % 4, images, np.arange(8) % 4)
    found = augment.transforms(transforms, dataset)
    return Trained(make(TrainSettings, {}), Recipe(), {}, dataset, model, found, TrainState(model)), images


def _shake(model: keras.Model) -> None:
    """Give batch norms moving statistics and offsets that are not those of a new net."""
    for variable in model.variables:
        if variable.path.endswith(("moving_mean", "beta", "whiten/kernel")):
            variable.assign(RANDOM.normal(scale=0.2, size=variable.shape))
        if variable.path.endswith("moving_variance"):
            variable.assign(RANDOM.uniform(0.5, 1.5, size=variable.shape))


@pytest.mark.parametrize(
    ("name", "side", "precision"),
    [("fast", 32, "mixed_bfloat16"), ("tutorial", 24, "float64"), ("resnet20", 32, "float32")],
)
def test_an_exported_net_answers_as_the_net_by_tensorflow_alone(name: str, side: int, precision: str) -> None:
    model = nets.build(name, side, precision).model
    _shake(model)
    trained, images = _trained(model, side)
    expected = tf.cast(model(trained.transforms.test(images)), tf.float64).numpy()
    made = classifier(trained)
    graph = tf.function(made).get_concrete_function(tf.TensorSpec([None, None, None, 3], tf.uint8)).graph.as_graph_def()
    nodes = [node for part in (graph.node, *(f.node_def for f in graph.library.function)) for node in part]
    assert not [node.op for node in nodes if "Xla" in str(node.attr) or "HvdCifar" in node.op]
    assert not [node.op for node in nodes if "BFLOAT16" in str(node.attr)]
    found = made(images)["logits"]
    scale = np.abs(expected).max()
    assert found.dtype == tf.float32
    assert np.abs(found.numpy() - expected).max() < scale * (0.05 if precision == "mixed_bfloat16" else 3e-6)


class Doubled(layers.Layer):
    """A user's layer, which Keras cannot load without its code."""

    def call(self, images: Any) -> Any:
        return images + images


class Scaled(QuickConv2D):
    """A user's layer that changes what it inherits."""

    def call(self, images: Any) -> Any:
        return 2.0 * super().call(images)


class Subclass(keras.Model):
    """A user's model without a graph of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.Dense(4)

    def call(self, images: Any) -> Any:
        return self.inner(images[:, 0, 0])


def _functional() -> keras.Model:
    learnt = layers.Normalization()
    learnt.adapt(RANDOM.normal(3, 2, size=(50, 6, 6, 3)))
    inner = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same"), SyncBatchNormalization()])
    images = keras.Input((6, 6, 3))
    x = layers.Lambda(lambda x: x * 0.5)(Scaled(16, 3, padding="same")(Doubled()(inner(learnt(images)))))
    return keras.Model(images, layers.Dense(4)(layers.Flatten()(layers.Dropout(0.5)(keras.ops.sin(x)))))


@pytest.mark.parametrize("build", [_functional, Subclass])
def test_nets_of_any_layers_are_exported(build: Callable[[], keras.Model], tmp_path: Path) -> None:
    model = build()
    model(np.zeros((1, 6, 6, 3), np.float32))
    convert_sync_batch_norm(model)
    _shake(model)
    trained, images = _trained(model, 6)
    expected = model(trained.transforms.test(images)).numpy()
    save(trained, tmp_path / "net")
    loaded = tf.saved_model.load(str(tmp_path / "net"))
    assert loaded.serve(images)["logits"].numpy() == pytest.approx(expected, abs=1e-5)


def test_transforms_that_are_python_alone_are_refused() -> None:
    given = keras.Input((4, 4, 3))
    trained, images = _trained(keras.Model(given, layers.Dense(4)(layers.Flatten()(given))), 4)
    assert classifier(trained)(images)["probabilities"].shape == (8, 4)
    python_alone = replace(trained, transforms=trained.transforms._replace(portable=None))
    with pytest.raises(UserError, match="TensorFlow cannot load its recipe's Transforms: set their `portable`"):
        classifier(python_alone)


@pytest.mark.parametrize("name", ["standard", "fast", "tutorial", "none"])
def test_portable_transforms_are_those_of_test_images(name: str) -> None:
    images = RANDOM.integers(0, 256, (4, 12, 8, 3), np.uint8)
    images[0] = 77  # of one colour: it has no deviation
    labels = np.arange(4)
    found = augment.transforms(name, Dataset.from_arrays(images, labels, images, labels))
    assert found.portable is not None
    made = found.portable(augment.fit(images, (12, 8, 3))).numpy()
    assert made.shape == (4, *found.shape) and made.dtype == np.float32
    assert made == pytest.approx(found.test(images), abs=2e-6)


def test_images_of_any_size_fit() -> None:
    """Those of the shape stay, to the bit; others keep their proportions, and lose what is at both ends."""
    images = RANDOM.integers(0, 256, (2, 9, 12, 3), np.uint8)
    assert (augment.fit(images, (9, 12, 3)).numpy() == images).all()
    wide = np.zeros((1, 18, 60, 1), np.uint8)
    wide[:, :, 18:42] = 200
    for image in (wide, wide.transpose(0, 2, 1, 3)):
        shape = (9, 12, 1) if image is wide else (12, 9, 1)
        assert (augment.fit(image, shape).numpy() == np.full((1, *shape), 200)).all()
    assert augment.fit(images[:, :3, :4], (9, 12, 3)).shape == (2, 9, 12, 3)


def test_a_folder_has_its_images_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b/2.PNG", "b/1.jpg", "a.webp", "notes.txt", "c.png/d.gif", "empty/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert images_in(tmp_path) == [tmp_path / name for name in ("a.webp", "b/1.jpg", "b/2.PNG", "c.png/d.gif")]
    assert images_in(tmp_path / "none.png") == [tmp_path / "none.png"]
    with pytest.raises(UserError, match="empty: the folder has no images"):
        images_in(tmp_path / "empty")


def test_names_of_classes_and_images_do_nothing_to_a_terminal() -> None:
    image, classes = Path("a\x1b[2J.png"), [("cat\x1b]0;owned\x07\nfake: dog 99%", 0.75), ("dog", 0.25)]
    assert as_text(image, classes) == r"a\x1b[2J.png: cat\x1b]0;owned\x07\nfake: dog 99% 75.0%, dog 25.0%"
    assert as_json(image, classes).isprintable()
