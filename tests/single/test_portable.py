"""Nets as Keras alone can load them: the same answers, and no class or function of anyone else's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from benchmarks import nets
from hvd_cifar import SyncBatchNormalization
from hvd_cifar.data import augment
from hvd_cifar.data.dataset import Dataset
from hvd_cifar.distributed import convert_sync_batch_norm
from hvd_cifar.errors import UserError
from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.layers import FusedBatchNormalization, QuickRelu
from hvd_cifar.models.portable import portable

RANDOM = np.random.default_rng(5)


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
def test_a_portable_net_answers_as_the_net(name: str, side: int, precision: str) -> None:
    model = nets.build(name, side, precision).model
    _shake(model)
    images = RANDOM.normal(size=(8, side, side, 3)).astype(np.float32)
    expected = tf.cast(model(images), tf.float64).numpy()
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    made = portable(model, (side, side, 3))
    found = made(images)
    assert found.dtype == tf.float32 and {variable.dtype for variable in made.variables} == {"float32"}
    scale = np.abs(expected).max()
    assert np.abs(found.numpy() - expected).max() < scale * (0.05 if precision == "mixed_bfloat16" else 3e-6)
    assert "hvd_cifar" not in json.dumps(made.get_config())


class Doubled(layers.Layer):
    """A user's layer that says how Keras does the same."""

    def call(self, images: Any) -> Any:
        return images + images

    def portable(self, images: Any) -> Any:
        return 2.0 * images


class Plain(layers.Layer):
    def call(self, images: Any) -> Any:
        return images


def squash(x: Any) -> Any:
    return x / (1 + abs(x))


@keras.saving.register_keras_serializable("tests")
def registered(x: Any) -> Any:
    return squash(x)


def _net(*through: Callable[..., Any]) -> keras.Model:
    x = images = keras.Input((6, 6, 3))
    for layer in through:
        x = layer(x)
    return keras.Model(images, layers.Dense(4)(layers.Flatten()(x)))


def test_everything_that_keras_has_and_a_layer_that_is_portable_pass(tmp_path: Path) -> None:
    learnt = layers.Normalization()
    learnt.adapt(RANDOM.normal(3, 2, size=(50, 6, 6, 3)))
    inner = keras.Sequential([keras.Input((6, 6, 3)), layers.Conv2D(3, 3, padding="same"), SyncBatchNormalization()])
    shared = layers.Conv2D(3, 1, kernel_regularizer="l2")
    seen = keras.Input((6, 6, 3))
    block = keras.Model(seen, [layers.Add()([shared(shared(seen)), seen]), seen])
    net = _net(learnt, inner, Doubled(), layers.Dropout(0.5), lambda x: block(x)[0], lambda x: keras.ops.sin(x) * 0.5)
    model = keras.Sequential([net])
    model(np.zeros((1, 6, 6, 3), np.float32))
    convert_sync_batch_norm(model)
    for subject in (net, model):
        _shake(subject)
        images = RANDOM.normal(size=(5, 6, 6, 3)).astype(np.float32)
        expected = subject(images).numpy()
        portable(subject, (6, 6, 3)).save(tmp_path / "net.keras")
        loaded = keras.saving.load_model(tmp_path / "net.keras")
        assert loaded(images).numpy() == pytest.approx(expected, abs=1e-6)
        assert not any(isinstance(layer, (Doubled, SyncBatchNormalization)) for layer in loaded._flatten_layers())


def test_a_layer_that_is_called_twice_has_one_answer_everywhere(tmp_path: Path) -> None:
    keras.utils.clear_session()  # Keras counts the names from here
    shared, others, relu = FusedBatchNormalization(), [FusedBatchNormalization() for _ in range(2)], QuickRelu()
    images = keras.Input((6, 6, 3))
    x = relu([shared(relu([images, images])), images])
    x = others[1](others[0](shared(x)))
    model = keras.Model(images, layers.Flatten()(x))
    _shake(model)
    values = RANDOM.normal(size=(5, 6, 6, 3)).astype(np.float32)
    portable(model, (6, 6, 3)).save(tmp_path / "net.keras")
    assert keras.saving.load_model(tmp_path / "net.keras")(values).numpy() == pytest.approx(
        model(values).numpy(), abs=1e-5
    )


class Scaled(QuickConv2D):
    """A user's layer that changes what it inherits."""

    def call(self, images: Any) -> Any:
        return 2.0 * super().call(images)


class Subclass(keras.Model):
    def call(self, images: Any) -> Any:
        return images[:, 0, 0]


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: _net(Plain(name="mine")), r"its layer mine \(Plain\)"),
        (lambda: _net(layers.Lambda(squash)), r"its layer lambda.* \(Lambda\)"),
        (lambda: _net(layers.Conv2D(2, 3, activation=squash)), r"a function in its layer conv2d.* \(Conv2D\)"),
        (lambda: _net(layers.Conv2D(2, 3, activation=registered)), "its function tests>registered"),
        (lambda: _net(Scaled(2, 3)), r"its layer scaled.* \(Scaled\)"),
        (Subclass, r"its layer subclass.* \(Subclass\)"),
    ],
    ids=["layer", "Lambda", "function", "registered", "inherited", "model"],
)
@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_what_only_its_own_code_can_load_is_refused_by_name(make: Callable[[], keras.Model], named: str) -> None:
    with pytest.raises(UserError, match=f"^{named} is not Keras's own, so TensorFlow alone cannot load it: "):
        portable(make(), (6, 6, 3))


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
