"""The nets against their papers' sizes, and the layers against Keras's and TensorFlow's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from benchmarks import nets
from hvd_cifar import models
from hvd_cifar.errors import UserError
from hvd_cifar.models.fast import Dirac, whitening
from hvd_cifar.models.layers import FusedBatchNormalization, LocalResponseNormalization, SteadyMaxPooling2D

PRECISIONS = ["float32", "float64", "mixed_bfloat16", "mixed_float16"]


@pytest.mark.parametrize(
    ("name", "side", "parameters", "paper"),
    [
        ("fast", 32, 2_598_336, None),
        ("tutorial", 24, 1_068_298, None),
        ("resnet20", 32, 269_722, 0.27e6),
        ("resnet32", 32, 464_154, 0.46e6),
        ("resnet56", 32, 853_018, 0.85e6),
    ],
)
def test_parameter_counts(name: str, side: int, parameters: int, paper: float | None) -> None:
    net = nets.build(name, side)
    assert net.parameters == parameters
    assert paper is None or round(parameters / 1e4) == round(paper / 1e4)
    assert net.model(np.zeros((2, side, side, 3), np.float32)).shape == (2, 10)


def test_weight_decay_pulls_at_kernels_as_the_sources_say() -> None:
    assert [v.path for v in nets.build("tutorial", 24).decayed] == ["local3/kernel", "local4/kernel"]
    assert [v.path for v in nets.build("fast", 32).decayed] == ["logits/kernel"]
    decayed = nets.build("resnet20", 32).decayed
    assert len(decayed) == 20 and all(v.path.endswith("kernel") for v in decayed)


@pytest.mark.parametrize("name", ["tutorial", "resnet20", "fast"])
def test_keras_can_make_a_net_anew_from_its_configuration(name: str, tmp_path: Path) -> None:
    model = nets.build(name, 16, "float32").model
    images = np.random.default_rng(6).normal(size=(3, 16, 16, 3)).astype(np.float32)
    model.save(tmp_path / "net.keras")
    assert np.array_equal(keras.saving.load_model(tmp_path / "net.keras")(images), model(images))


@pytest.mark.parametrize("name", ["tutorial", "resnet20", "fast"])
def test_written_out_layers_equal_the_fused_ones(name: str) -> None:
    """The float64 net computes the same function as the float32 one."""
    side = 24 if name == "tutorial" else 32
    single, double = (nets.build(name, side, precision, seed=1).model for precision in ("float32", "float64"))
    double.set_weights(single.get_weights())
    images = np.random.default_rng(0).normal(size=(8, side, side, 3)).astype(np.float32)
    for training in (True, False):
        a, b = single(images, training=training).numpy(), double(images.astype(np.float64), training=training).numpy()
        assert np.allclose(a, b, rtol=1e-3, atol=1e-4)  # float32's rounding through 20 layers
    for v, w in zip(single.non_trainable_variables, double.non_trainable_variables, strict=True):
        assert np.allclose(v.numpy(), w.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_fused_batch_norm_equals_keras(training: bool) -> None:
    ours, theirs = FusedBatchNormalization(), keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)
    draw = np.random.default_rng(1)
    x, upstream = draw.normal(2.0, 3.0, (2, 16, 5, 5, 7)).astype(np.float32)
    both: list[Any] = [ours, theirs]
    for layer in both:
        layer(x)
        layer.gamma.assign(np.linspace(0.5, 2, 7))
        layer.beta.assign(np.linspace(-1, 1, 7))
    results = [_with_gradient(partial(layer, training=training), tf.constant(x), upstream) for layer in both]
    for a, b in zip(*results, strict=True):
        assert np.allclose(a, b, atol=1e-3)
    assert np.allclose(ours.moving_mean.numpy(), theirs.moving_mean.numpy(), atol=1e-5)
    unbiased = 400 / 399  # Keras keeps the biased variance of the 16 * 5 * 5 values, the fused kernel the unbiased one
    if training:
        gathered = (theirs.moving_variance.numpy() - 0.9) * unbiased + 0.9
        assert np.allclose(ours.moving_variance.numpy(), gathered, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_frozen_fused_batch_norm_uses_its_moving_statistics(dtype: str) -> None:
    norm = FusedBatchNormalization(dtype=dtype)
    images = np.random.default_rng(1).normal(5.0, 3.0, (4, 5, 5, 7)).astype(dtype)
    evaluated = norm(images).numpy()
    norm.trainable = False
    assert np.array_equal(norm(images, training=True), evaluated) and not norm.moving_mean.numpy().any()
    norm.trainable = True
    # As from a block that passes `training=None` on.
    assert np.array_equal(norm(images, training=None), evaluated) and not norm.moving_mean.numpy().any()
    assert not np.allclose(norm(images, training=True), evaluated) and norm.moving_mean.numpy().all()


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_local_response_normalization_equals_tensorflow_s_kernel(dtype: str) -> None:
    x, upstream = np.random.default_rng(2).normal(0, 40, (2, 3, 4, 4, 16)).astype(np.float32)
    layer = LocalResponseNormalization(dtype=dtype)
    found = _with_gradient(layer, tf.cast(x, layer.compute_dtype), upstream)
    expected = _with_gradient(
        lambda x: tf.nn.local_response_normalization(x, 4, 1.0, 0.001 / 9.0, 0.75), tf.constant(x), upstream
    )
    tolerance = {"mixed_bfloat16": 2e-2, "mixed_float16": 2e-3}.get(dtype, 1e-5)  # their 8 and 11 bits
    # Gradients of some 20 are differences of two terms, and may come near zero; responses do not.
    for one, other, near_zero in zip(found, expected, (1e-8, 10 * tolerance), strict=True):
        np.testing.assert_allclose(tf.cast(one, tf.float32), other, rtol=tolerance, atol=near_zero)


def _with_gradient(function: Callable[[Any], Any], x: Any, upstream: Any) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    return y, tape.gradient(y, x, tf.cast(upstream, y.dtype))


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("size", [2, 3, None])
def test_steady_maximum_is_the_maximum(dtype: str, size: int | None) -> None:
    images = np.random.default_rng(12).permutation(2 * 7 * 8 * 3).reshape(2, 7, 8, 3) / 256  # no two of them near
    layer = SteadyMaxPooling2D(size, dtype=dtype)
    x = tf.cast(images, layer.compute_dtype)
    pooled = tf.nn.max_pool2d(tf.cast(x, "float32"), size, size, "VALID") if size else tf.reduce_max(x, axis=[1, 2])
    found = tf.function(layer, autograph=False)(x)
    assert found.dtype == layer.compute_dtype and layer.compute_output_shape((2, 7, 8, 3)) == found.shape
    np.testing.assert_allclose(tf.cast(found, "float64"), tf.cast(pooled, "float64"), atol=7 * 8 * 1e-5)  # times TIE


@pytest.mark.parametrize(("dtype", "rounding"), [("float32", 3e-7), ("float64", 1e-15)])
@pytest.mark.parametrize("size", [2, None])
def test_steady_maximum_s_gradient_does_not_depend_on_rounding(dtype: str, rounding: float, size: int | None) -> None:
    draw = np.random.default_rng(13)
    flat = np.broadcast_to(draw.uniform(-9, 9, size=(50, 1, 1, 7)), (50, 4, 4, 7))
    noise = flat * draw.choice([-rounding, 0.0, rounding], flat.shape)
    layer = SteadyMaxPooling2D(size, dtype=dtype)
    upstream = draw.normal(size=layer(tf.constant(flat)).shape)
    _, gradient = _with_gradient(layer, tf.constant(flat + noise, dtype), upstream)
    expected = np.zeros(flat.shape)
    step = size or 4
    expected[:, ::step, ::step] = upstream.reshape(50, 4 // step, 4 // step, 7)  # the first pixel's, all of it
    np.testing.assert_array_equal(gradient, expected.astype(dtype))


def test_dirac_passes_its_input_on_in_the_first_channels() -> None:
    kernel = keras.ops.convert_to_numpy(Dirac()((3, 3, 4, 6)))
    x = np.random.default_rng(5).normal(size=(2, 5, 5, 4)).astype(np.float32)
    y = tf.nn.conv2d(x, kernel, 1, "SAME").numpy()
    assert np.allclose(y[..., :4], x, atol=1e-6)
    rest = kernel[..., 4:]
    assert 0.8 / 6 < np.abs(rest).max() < 1 / 6  # uniform within 1 / sqrt(3 * 3 * 4)
    fewer = keras.ops.convert_to_numpy(Dirac()((3, 3, 4, 2)))
    assert np.allclose(tf.nn.conv2d(x, fewer, 1, "SAME"), x[..., :2], atol=1e-6)


def test_whitening_makes_the_values_of_a_patch_uncorrelated_the_same_on_all_machines() -> None:
    draw = np.random.default_rng(6)
    smooth = draw.normal(size=(400, 9, 9, 3)) @ draw.normal(size=(3, 3))  # colours go together
    images = ((smooth[:, 1:] + smooth[:, :-1])[:, :, :8]).astype(np.float32)
    kernel = whitening(images, epsilon=0.0)
    found = tf.nn.conv2d(images, kernel, 1, "VALID").numpy().reshape(-1, 24)
    assert np.allclose(found[:, :12], -found[:, 12:], atol=1e-4)
    assert np.allclose(found[:, :12].T @ found[:, :12] / len(found), np.eye(12), atol=1e-3)
    filters = kernel.reshape(12, 24)[:, :12]  # an eigenvector's sign depends on the linear algebra
    assert (np.take_along_axis(filters, np.abs(filters).argmax(axis=0)[None], axis=0) > 0).all()
    images[..., 2] = images[..., 0]  # a direction without variance
    assert np.abs(whitening(images)).max() <= 5e-4**-0.5


def test_only_layers_that_learn_from_images_ask_for_them() -> None:
    net = nets.build("fast", 32)
    images = np.random.default_rng(7).normal(size=(50, 32, 32, 3)).astype(np.float32)
    models.adapt(net, lambda: images)
    assert (net.model.get_layer("whiten").kernel.numpy() == whitening(images)).all()
    assert not any(v.path.startswith("whiten") for v in net.model.trainable_variables)
    mean = {"mean": [1.0, 2.0, 3.0], "variance": [1.0, 1.0, 1.0]}
    fixed = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Normalization(**mean), keras.layers.Flatten()])
    models.adapt(models.Net(fixed, []), lambda: pytest.fail("nothing learns"))


def _with_last(*last: Any, nested: bool = False) -> models.Model:
    def build(image_shape: tuple[int, int, int], classes: int) -> Any:
        layers = [keras.layers.Flatten(), *(keras.layers.Dense(classes) if layer is None else layer for layer in last)]
        images = keras.Input(image_shape)
        return keras.Sequential([images, keras.Sequential(layers)] if nested else [images, *layers])

    return models.Model("mine", build)


@pytest.mark.parametrize("nested", [True, False])
def test_a_net_that_makes_probabilities_is_refused(nested: bool) -> None:
    dense, named = keras.layers.Dense, {"name": "last"}
    for last in (
        [dense(3, activation="sigmoid", **named)],
        [None, keras.layers.Activation("softmax", **named)],
        [None, keras.layers.Softmax(**named)],
    ):
        with pytest.raises(UserError, match="--model mine: its last layer last makes probabilities; make logits"):
            models.with_recipe(_with_last(*last, nested=nested), (4, 4, 1), 3)
    for fine in ([dense(5, activation="softmax"), None], [dense(3, activation="relu")]):
        models.with_recipe(_with_last(*fine, nested=nested), (4, 4, 1), 3)


class FailsWhenCalled(keras.Model):
    """A user's subclass with a mistake."""

    def call(self, images: Any) -> Any:
        raise KeyError("features")


def test_a_net_that_fails_or_has_several_outputs_is_refused_in_one_line() -> None:
    told = r"^--model mine: KeyError: .* \(test_models.py, line \d+\); it is called as build\(\(8, 8, 3\), 10\)$"
    with pytest.raises(UserError, match=told):
        models.with_recipe(models.Model("mine", lambda *_: FailsWhenCalled()), (8, 8, 3), 10)

    def build(image_shape: tuple[int, int, int], classes: int) -> Any:
        images = keras.Input(image_shape)
        x = keras.layers.Flatten()(images)
        return keras.Model(images, [keras.layers.Dense(classes)(x), keras.layers.Dense(2)(x)])

    with pytest.raises(UserError, match=r"--model mine: makes a list of outputs; make one, the logits \(None, 3\)"):
        models.with_recipe(models.Model("mine", build), (4, 4, 1), 3)


def test_normalization_learns_once_and_from_images_alone() -> None:
    def mean_of(first: Any, *others: Any) -> Any:
        net = keras.Sequential([keras.Input((4, 4, 2)), first, *others])
        models.adapt(models.Net(net, []), lambda: np.full((4, 4, 4, 2), 20.0, np.float32))
        return first.mean

    assert np.allclose(mean_of(keras.layers.Normalization(), keras.layers.Flatten()), 20.0)
    learnt = keras.layers.Normalization()
    learnt.adapt(np.full((3, 4, 4, 2), 9.0))
    assert np.allclose(mean_of(learnt), 9.0)
    within = keras.Sequential([keras.layers.Normalization(), keras.layers.Flatten()])
    for net in ([keras.layers.Rescaling(0.5), keras.layers.Normalization()], [within]):
        with pytest.raises(UserError, match="the layer normalization.* would learn from other layers' outputs: give"):
            mean_of(*net)
