"""Synchronised batch norm on ranks against plain batch norm on one process with all images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks import error_of, run_ranks

RANKS, IMAGES, SHAPE = 3, 7, (3, 2, 5)  # the ranks get 3, 2 and 2 images
REAL = "float64"
UNBIASED = IMAGES * 6 / (IMAGES * 6 - 1)  # n / (n - 1), of n values of a channel


def _images() -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    images = draw.normal(size=(IMAGES, *SHAPE)) * draw.uniform(0.5, 2, SHAPE[-1]) + draw.normal(size=SHAPE[-1])
    upstream = draw.normal(size=(IMAGES, *SHAPE))
    return images, upstream


def _train(net: Any, images: Any, upstream: Any) -> dict[str, Any]:
    """Two training calls; output and gradients of the second, the output in evaluation, and all weights."""
    import tensorflow as tf

    images, upstream = tf.constant(images), tf.constant(upstream)
    weights = [v.value for v in net.trainable_variables]

    @tf.function
    def call() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            output = net(images, training=True)
            loss = tf.reduce_sum(tf.cast(output, upstream.dtype) * upstream)
        return output, tape.gradient(loss, [images, *weights])

    call()
    output, (of_images, *of_weights) = call()
    return {
        "output": output.numpy().tolist(),
        "of images": of_images.numpy().tolist(),
        "in evaluation": net(images, training=False).numpy().tolist(),
        "of weights": [g.numpy().tolist() for g in of_weights],
        "weights": [v.numpy().tolist() for v in net.variables],
    }


def _single(make: Any) -> Any:
    """A model of one layer."""
    import keras

    layer = make(momentum=0.5, epsilon=1e-5)
    net = keras.Sequential([keras.Input(SHAPE), layer])
    layer.gamma.assign(np.linspace(0.5, 1.5, SHAPE[-1]))
    layer.beta.assign(np.linspace(-1, 1, SHAPE[-1]))
    return net


def _nested() -> Any:
    """Layers on inputs of 2 to 4 dimensions, on another axis, without scale or offset; and a nested model."""
    import keras

    norm, tanh = keras.layers.BatchNormalization, keras.layers.Activation("tanh")
    inner = [keras.Input(SHAPE), norm(scale=False, name="norm1"), tanh, norm(name="norm2")]
    given = keras.Input(SHAPE)
    values = tanh(norm(axis=1, momentum=0.8, name="norm3")(tanh(keras.Sequential(inner, name="inner")(given))))
    values = keras.layers.Reshape((SHAPE[0] * SHAPE[1], SHAPE[2]))(values)
    values = tanh(norm(center=False, epsilon=0.1, name="norm4")(values))
    values = norm(name="norm5")(keras.layers.Flatten()(values))
    net = keras.Model(given, keras.layers.Reshape(SHAPE)(values), name="outer")
    draw = np.random.default_rng(4)
    for variable in net.trainable_variables:
        variable.assign(draw.uniform(0.5, 1.5, variable.shape))
    return net


def _cases(world: Any) -> dict[str, Any]:
    """What single layers do in half types, without examples, with constant values, under a mask, and with renorm."""
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import SyncBatchNormalization, convert_sync_batch_norm
    from hvd_cifar.distributed.batch_norm import examples_present

    found: dict[str, Any] = {}
    half = SyncBatchNormalization(dtype="mixed_bfloat16")
    found["half"] = half(tf.ones((2, *SHAPE), "bfloat16"), training=True).dtype.name, str(half.gamma.dtype)
    # First the last rank has no example, only a placeholder; then no rank has one.
    lone = SyncBatchNormalization(dtype="float64")
    placeholder = tf.fill((1, *SHAPE), tf.constant(1000.0, tf.float64))
    with examples_present(world.rank + 1 < world.size):
        lone(tf.ones((2, *SHAPE), "float64") if world.rank + 1 < world.size else placeholder, training=True)
    found["without the last"] = lone.moving_mean.numpy().tolist(), lone.moving_variance.numpy().tolist()
    with examples_present(False):
        output = lone(placeholder, training=True)
    kept = lone.moving_mean.numpy().tolist(), lone.moving_variance.numpy().tolist()
    found["without any"] = *kept, bool(np.isfinite(output.numpy()).all())

    # All values of a channel are one number, and large: rounding takes the mean of squares below the mean's square.
    constant = np.broadcast_to(np.random.default_rng(6).uniform(100, 1000, 256), (5, 3, 256)).astype("float32")
    flat = SyncBatchNormalization(dtype="float32", epsilon=1e-12, momentum=0.0)
    output = flat(constant, training=True)
    found["constant"] = bool(np.isfinite(output.numpy()).all()), float(flat.moving_variance.numpy().min())

    # Positions that a mask leaves out are not counted.
    masked = keras.layers.BatchNormalization(momentum=0.0)
    net = keras.Sequential([keras.Input((4, 2)), keras.layers.Masking(-1.0), masked])
    convert_sync_batch_norm(net)
    net(np.where(np.arange(4)[:, None] <= world.rank, world.rank + 1.0, np.full((2, 4, 2), -1.0)), training=True)
    found["masked"] = masked.moving_mean.numpy().tolist()

    refused = keras.Sequential([keras.layers.BatchNormalization(), keras.layers.BatchNormalization(renorm=True)])
    told = error_of(convert_sync_batch_norm, refused)
    found["renorm"] = told, type(refused.layers[0]) is keras.layers.BatchNormalization
    return found


def _on_ranks(folder: str) -> dict[str, Any]:
    from hvd_cifar.runtime.world import start

    world = start()
    import keras

    from hvd_cifar.distributed import SyncBatchNormalization, collectives, convert_sync_batch_norm

    class Unbiased(keras.layers.BatchNormalization):
        averages_unbiased_variances = True

    keras.config.set_floatx(REAL)
    keras.config.set_dtype_policy(REAL)
    mine = [array[world.rank :: world.size] for array in _images()]
    found: dict[str, Any] = {"synchronised": _train(_single(SyncBatchNormalization), *mine)}
    net = _single(Unbiased)
    convert_sync_batch_norm(net)
    found["unbiased"] = _train(net, *mine)
    net = _nested()
    paths, frozen = [v.path for v in net.variables], net.get_layer("norm5")
    counts = [convert_sync_batch_norm(net), convert_sync_batch_norm(net)]
    found["nested"] = _train(net, *mine)
    frozen.trainable = False
    before = frozen.moving_mean.numpy()
    net(mine[0], training=True)
    found["frozen"] = bool((frozen.moving_mean.numpy() == before).all())

    net.save(f"{folder}/{world.rank}.keras")
    plain = keras.models.load_model(f"{folder}/{world.rank}.keras")
    same = [(a.numpy() == b.numpy()).all() for a, b in zip(net.variables, plain.variables, strict=True)]
    unchanged = paths == [v.path for v in net.variables]
    found["saved"] = [unchanged, all(map(bool, same)), *counts, convert_sync_batch_norm(plain)]
    layer = SyncBatchNormalization(momentum=0.7, scale=False)
    found["config"] = SyncBatchNormalization.from_config(layer.get_config()).get_config() == layer.get_config()
    found |= _cases(world)
    collectives.barrier()  # no rank leaves before the last collective of another is done
    return found


def test_ranks_normalise_as_one_process_with_all_images(tmp_path: Path) -> None:
    import keras

    ranks = run_ranks(_on_ranks, RANKS, str(tmp_path))
    keras.config.set_floatx(REAL)
    keras.config.set_dtype_policy(REAL)
    single, nested = (_train(net, *_images()) for net in (_single(keras.layers.BatchNormalization), _nested()))
    for layer, expected in (("synchronised", single), ("unbiased", single), ("nested", nested)):
        of_ranks = [found[layer] for found in ranks]
        for rank, found in enumerate(of_ranks):
            biased = layer == "nested"
            for name in ("output", "of images", *(["in evaluation"] if biased else [])):
                near = np.allclose(found[name], expected[name][rank::RANKS], rtol=1e-12, atol=1e-12)
                assert near, (layer, rank, name)
            for i, (mine, theirs) in enumerate(zip(found["weights"], expected["weights"], strict=True)):
                if not biased and i == 3:  # from 1, by half twice
                    theirs = 0.25 + (np.array(theirs) - 0.25) * UNBIASED
                assert np.allclose(mine, theirs, rtol=1e-12), (layer, rank, i)
        for i, gradient in enumerate(expected["of weights"]):  # each rank's share: the optimizer adds them up
            total = np.sum([found["of weights"][i] for found in of_ranks], axis=0)
            assert np.allclose(total, gradient, rtol=1e-12, atol=1e-11), (layer, i)
    for found in ranks:
        assert found["saved"] == [True, True, 5, 0, 5]
        assert found["config"] and found["frozen"] and found["half"] == ["bfloat16", "float32"]
        mean, variance = found["without the last"]
        assert np.allclose(mean, 0.1) and np.allclose(variance, 0.9)  # of ones: the mean 1, the variance 0
        assert found["without any"] == [mean, variance, True]
        finite, least = found["constant"]
        assert finite and least >= 0.0
        # Rank r has r + 1 positions with the value r + 1 in each of its examples.
        counts = np.arange(1, RANKS + 1)
        assert np.allclose(found["masked"], (counts**2).sum() / counts.sum())
        text, untouched = found["renorm"]
        assert "renorm=True" in text and untouched
