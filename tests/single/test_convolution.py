"""The layer for convolutions: Keras's own, by whichever way is the quickest, and gradients over images side by side."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.kernels import compiled, side_by_side
from hvd_cifar.models.convolution import QuickConv2D


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "operations", lambda: None)


@pytest.mark.parametrize(
    ("side", "channels", "dtype", "own"),
    [
        (16, 32, "float32", True),
        (16, 8, "float32", False),
        (16, 32, "float64", False),
        (None, 32, "float32", True),  # of any size
    ],
)
def test_what_set_up_compiled_is_taken(side: int | None, channels: int, dtype: str, own: bool) -> None:
    layer = QuickConv2D(32, 3, padding="same", use_bias=False, dtype=dtype)
    shape = (None, side, side, channels)
    layer.build(shape)
    traced = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype))
    kinds = {op.type for op in traced.graph.get_operations()}
    own = own and compiled.operations() is not None
    assert ("HvdCifarConvolution" in kinds) == own
    assert ("Conv2D" in kinds) == (not own)
    assert traced.structured_outputs.shape[1:] == (side, side, 32)


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("side", "taps", "channels", "filters", "dtype", "quick"),
    [
        (12, 5, 64, 64, "float32", True),
        (12, 5, 64, 64, "float64", True),
        (7, 3, 256, 256, "float32", False),  # what set-up compiles, or oneDNN
        (8, 5, 32, 64, "float32", False),  # few weights
        (20, 5, 64, 64, "float32", False),  # many pixels
        (11, 5, 64, 64, "float32", False),  # no whole number of tiles
        (8, 7, 64, 64, "float32", False),  # a size without points
        (8, 5, 256, 256, "float16", False),  # few bits
        (None, 5, 256, 256, "float32", False),  # of any size: a model that is being built
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_fewer_multiplications_where_they_are_quicker(
    side: int | None, taps: int, channels: int, filters: int, dtype: str, quick: bool, bias: bool
) -> None:
    layer = QuickConv2D(filters, taps, padding="same", use_bias=bias, dtype=dtype, bias_initializer="ones")
    shape = (None, side, side, channels)
    layer.build(shape)
    traced = tf.function(layer, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype))
    kinds = {op.type for op in traced.graph.get_operations()}
    assert ("Conv2D" not in kinds) == quick
    assert traced.structured_outputs.shape[1:] == (side, side, filters)
    if side is not None:
        assert np.allclose(traced(tf.zeros((1, *shape[1:]), dtype))[0], float(bias))


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "relu"},
        {"dilation_rate": 2},
        {"strides": 2},
        {"groups": 2},
        {"padding": "valid"},
    ],
)
def test_the_layer_is_keras_s_with_any_option(options: dict[str, Any]) -> None:
    images = tf.constant(np.random.default_rng(5).normal(size=(2, 7, 7, 256)), "float64")
    layers = [
        kind(128, 3, dtype="float64", **{"padding": "same", **options}) for kind in (QuickConv2D, keras.layers.Conv2D)
    ]
    for layer in layers:
        layer.build(images.shape)
    layers[1].set_weights(layers[0].get_weights())
    np.testing.assert_allclose(layers[0](images), layers[1](images), rtol=0, atol=1e-12)


class _Standardised(QuickConv2D):
    def convolution_op(self, inputs: Any, kernel: Any) -> Any:
        return super().convolution_op(inputs, kernel - tf.reduce_mean(kernel, axis=[0, 1, 2]))


def test_a_subclass_that_changes_the_convolution_does_so_on_any_machine() -> None:
    images = tf.constant(np.random.default_rng(5).normal(size=(2, 8, 8, 32)), "float32")
    layer, plain = _Standardised(32, 3, padding="same"), keras.layers.Conv2D(32, 3, padding="same")
    for each in (layer, plain):
        each.build(images.shape)
    layer.bias.assign(np.arange(32))
    kernel = layer.kernel.numpy()
    plain.set_weights([kernel - kernel.mean((0, 1, 2)), layer.bias.numpy()])
    np.testing.assert_allclose(layer(images), plain(images), rtol=0, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3, 8, 11])  # less than a row holds, and what no row divides
@pytest.mark.parametrize(
    "size, taps", [((3, 3), 3), ((7, 7), 3), ((5, 12), 3), ((12, 5), 5), ((1, 1), 3), ((32, 32), 3)]
)
def test_gradients_over_images_side_by_side_are_the_convolution_s(size: tuple[int, int], taps: int, batch: int) -> None:
    """In float64, where neither way rounds enough to hide a pixel that is missing."""
    draw = np.random.default_rng(12)
    shapes = (batch, *size, 7), (taps, taps, 7, 5), (batch, *size, 5)
    x, kernel, upstream = (tf.constant(draw.normal(size=shape)) for shape in shapes)

    def both(conv: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = tf.function(conv, autograph=False)(x, kernel)
        return [y, *tape.gradient(y, [x, kernel], upstream)]

    plain = both(lambda x, kernel: tf.nn.conv2d(x, kernel, 1, "SAME"))
    for one, other in zip(both(side_by_side.convolve), plain, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_images_lie_in_rows_with_zeros_between() -> None:
    images = tf.reshape(tf.range(1.0, 13.0), [3, 2, 2, 1])  # rows [1, 2], [3, 4]; [5, 6], [7, 8]; [9, 10], [11, 12]
    rows = side_by_side.in_rows(images, 2, 1)
    assert rows[..., 0].numpy().tolist() == [
        [[1, 2, 0, 9, 10], [3, 4, 0, 11, 12]],
        [[5, 6, 0, 0, 0], [7, 8, 0, 0, 0]],
    ]


@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(
    ("side", "taps", "dtype", "joined"),
    [
        (7, 3, "bfloat16", True),
        (12, 5, "bfloat16", True),
        (15, 3, "bfloat16", False),  # long rows
        (7, 3, "float16", False),
        (7, 1, "bfloat16", False),
        (None, 3, "bfloat16", False),
    ],
)
def test_side_by_side_where_it_is_quicker(side: int | None, taps: int, dtype: str, joined: bool) -> None:
    layer = QuickConv2D(8, taps, padding="same", dtype=f"mixed_{dtype}")
    shape = (None, side, side, 4)
    layer.build(shape)

    def gradient(images: Any) -> Any:
        with tf.GradientTape() as tape:
            made = layer(images)
        return tape.gradient(made, layer.kernel.value)

    traced = tf.function(gradient, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype))
    kinds = [op.type for op in traced.graph.get_operations()]
    assert ("ConcatV2" in kinds) == joined
    assert kinds.count("Conv2DBackpropFilter") == 1
