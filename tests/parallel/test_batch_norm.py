"""Synchronised batch norm on ranks against plain batch norm on one process with all images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ranks import run_ranks

IMAGES, SHAPE = 7, (3, 2, 5)  # 7 images: 3 ranks get 3, 2 and 2 of them


def _images(kind: str) -> tuple[Any, Any]:
    draw = np.random.default_rng(1)
    images = draw.normal(size=(IMAGES, *SHAPE)) * draw.uniform(0.5, 2, SHAPE[-1]) + draw.normal(size=SHAPE[-1])
    upstream = draw.normal(size=(IMAGES, *SHAPE))
    return images.astype(kind), upstream.astype(kind)


def _normalise(layer: Any, kind: str, rank: int, size: int) -> dict[str, Any]:
    """Two training calls on a rank's images; output and gradients of the second, and the moving statistics."""
    import tensorflow as tf

    images, upstream = (tf.constant(array[rank::size]) for array in _images(kind))
    layer.build((None, *SHAPE))
    layer.gamma.assign(np.linspace(0.5, 1.5, SHAPE[-1]))
    layer.beta.assign(np.linspace(-1, 1, SHAPE[-1]))

    @tf.function
    def call() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            output = layer(images, training=True)
            loss = tf.reduce_sum(tf.cast(output, upstream.dtype) * upstream)
        return output, tape.gradient(loss, [images, layer.gamma.value, layer.beta.value])

    call()
    output, (of_images, of_gamma, of_beta) = call()
    plain = layer(images, training=False)
    return {
        "output": output.numpy().tolist(),
        "in evaluation": plain.numpy().tolist(),
        "of images": of_images.numpy().tolist(),
        "of gamma": of_gamma.numpy().tolist(),
        "of beta": of_beta.numpy().tolist(),
        "mean": layer.moving_mean.numpy().tolist(),
        "variance": layer.moving_variance.numpy().tolist(),
    }


def _on_ranks() -> dict[str, Any]:
    from hvd_cifar.distributed.batch_norm import SyncBatchNormalization
    from hvd_cifar.runtime.world import start

    world = start()
    import keras
    import tensorflow as tf

    from hvd_cifar.distributed import collectives
    from hvd_cifar.models.normalization import examples_present

    found: dict[str, Any] = {}
    for kind in ("float64", "float32"):
        keras.config.set_floatx(kind)
        found[kind] = _normalise(SyncBatchNormalization(dtype=kind), kind, world.rank, world.size)
    half = SyncBatchNormalization(dtype="mixed_bfloat16")
    found["half"] = half(tf.ones((2, *SHAPE), "bfloat16"), training=True).dtype.name, str(half.gamma.dtype)
    # The last rank has no example, only a stand-in; and then no rank has one.
    lone = SyncBatchNormalization(dtype="float64")
    stand_in = tf.fill((1, *SHAPE), tf.constant(1000.0, tf.float64))
    with examples_present(world.rank + 1 < world.size):
        lone(tf.ones((2, *SHAPE), "float64") if world.rank + 1 < world.size else stand_in, training=True)
    found["without the last"] = lone.moving_mean.numpy().tolist(), lone.moving_variance.numpy().tolist()
    with examples_present(False):
        output = lone(stand_in, training=True)
    found["without any"] = lone.moving_mean.numpy().tolist(), bool(np.isfinite(output.numpy()).all())
    collectives.all_gather_object(None)  # no rank leaves before the last collective of another is done
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_normalise_as_one_process_with_all_images(n: int) -> None:
    from hvd_cifar.models.normalization import FusedBatchNormalization

    ranks = run_ranks(_on_ranks, n)
    # float64 sums in another order; float32's fused kernel against sums written out.
    for kind, tolerance in (("float64", 1e-13), ("float32", 3e-5)):
        whole = _normalise(FusedBatchNormalization(dtype=kind), kind, 0, 1)
        for rank, found in enumerate(found[kind] for found in ranks):
            for name in ("output", "in evaluation", "of images"):
                assert np.allclose(found[name], whole[name][rank::n], rtol=tolerance, atol=tolerance), (kind, name)
            for name in ("mean", "variance"):
                assert np.allclose(found[name], whole[name], rtol=tolerance), (kind, name)
        for name in ("of gamma", "of beta"):  # each rank's share: the optimizer adds them up
            total = np.sum([found[kind][name] for found in ranks], axis=0)
            assert np.allclose(total, whole[name], rtol=tolerance, atol=tolerance), (kind, name)
    for found in ranks:
        assert found["half"] == ["bfloat16", "float32"]
        mean, variance = found["without the last"]
        assert np.allclose(mean, 0.1) and np.allclose(variance, 0.9)  # of ones: the mean 1, the variance 0
        assert found["without any"] == [mean, True]
