"""Time of the project's own layers, each beside TensorFlow's or Keras's layer with the same values.

    python -m benchmarks.layers
    python -m benchmarks.layers --precision bfloat16
    python -m benchmarks.layers --only "batch norm"

Forward and backward of one layer on one thread, the two layers in turns, so that a machine that drifts favours neither.
A row has the images, milliseconds of both layers ("plain" and "own"), and their ratio, pair by pair.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import click

from benchmarks import setting
from hvd_cifar.runtime.environment import prepare_tensorflow

prepare_tensorflow(os.environ)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Way = Callable[[Any], Any]


class Case(NamedTuple):
    """A layer on images of one shape.

    Attributes:
        name: of what is computed, and of the net that does.
        shape: of the images, [b, h, w, c].
        plain: how TensorFlow or Keras does it.
        own: how this project does it.
    """

    name: str
    shape: tuple[int, int, int, int]
    plain: Way
    own: Way


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--repeats", type=click.IntRange(3), default=15)
@click.option("--precision", type=click.Choice(["float32", "bfloat16"]), default="float32")
@click.option("--only", default="", help="Only rows whose name contains this.")
@setting.one_line_for_users()
def main(repeats: int, precision: str, only: str) -> None:
    """Measure, then print a table in Markdown."""
    import tensorflow as tf

    chosen = [case for case in cases(precision) if only in case.name]
    if not chosen:
        raise click.BadParameter(f"no row's name holds {only!r}", param_hint="--only")
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    print("| forward and backward | images | plain, ms | own, ms | of plain, median (quartiles) |")
    print("|---|---|---|---|---|")
    for case in chosen:
        print(row(case, *measure(case, repeats, precision)), flush=True)
    print(f"\n{precision}, one thread, n = {repeats} pairs; {setting.about()}")


def cases(precision: str) -> list[Case]:
    """Layers of this project's nets, and convolutions for which a net takes TensorFlow's kernel."""
    import keras
    import tensorflow as tf

    from hvd_cifar.kernels import compiled, side_by_side, winograd
    from hvd_cifar.models.activation import QuickGelu, QuickRelu
    from hvd_cifar.models.normalization import FusedBatchNormalization, LocalResponseNormalization
    from hvd_cifar.models.resnet import PadShortcut

    dtype = "float32" if precision == "float32" else "mixed_bfloat16"

    def convolution(name: str, shape: tuple[int, int, int, int], filters: int, taps: int) -> Case:
        @cache  # at its first use, when the threads are set
        def kernel() -> Any:
            drawn = tf.random.stateless_normal((taps, taps, shape[-1], filters), (1, 2))
            return tf.Variable(tf.cast(drawn / (taps * shape[-1] ** 0.5), precision))

        own: Any
        if compiled.is_quicker((taps, taps, shape[-1], filters), precision):
            own, remark = compiled.convolve, ", compiled"
        elif precision == "bfloat16":
            own = side_by_side.convolve
            remark = "" if shape[2] <= side_by_side.MOST_PIXELS else " (the net uses plain)"
        else:
            own, remark = winograd.convolve, " (the net uses plain)" * (taps == 3)
        return Case(
            f"convolution {taps} x {taps} to {filters}, {name}{remark}",
            shape,
            lambda x: tf.nn.conv2d(x, kernel(), 1, "SAME"),
            lambda x: own(x, tf.convert_to_tensor(kernel())),
        )

    def norm(own: Any) -> Way:
        return lambda x: own(x, training=True)

    wide = (128, 32, 32, 16)
    relu = QuickRelu(copies=2, dtype=dtype)
    local_responses = tf.nn.local_response_normalization

    return [
        convolution("fast's third block", (512, 7, 7, 256), 256, 3),
        convolution("fast's third block, small images", (512, 5, 5, 256), 256, 3),
        convolution("fast's third block", (512, 3, 3, 256), 256, 3),
        convolution("fast's second block, small images", (512, 11, 11, 64), 256, 3),
        convolution("fast's second block", (512, 15, 15, 64), 256, 3),
        convolution("tutorial", (128, 12, 12, 64), 64, 5),
        convolution("fast's first block", (512, 31, 31, 24), 64, 3),
        convolution("fast's first block", (512, 15, 15, 64), 64, 3),
        convolution("ResNets' first stage", (128, 32, 32, 16), 16, 3),
        convolution("ResNets' second stage", (128, 16, 16, 32), 32, 3),
        convolution("ResNets' last stage", (128, 8, 8, 64), 64, 3),
        Case("GELU, fast", (512, 15, 15, 64), keras.activations.gelu, QuickGelu(dtype=dtype)),
        Case(
            "ReLU of a sum, with two consumers, resnet20",
            wide,
            lambda x: tf.concat([tf.nn.relu(x + x)] * 2, axis=-1),
            lambda x: tf.concat(relu([x, x]), axis=-1),
        ),
        Case(
            "local responses, tutorial",
            (128, 12, 12, 64),
            lambda x: tf.cast(local_responses(tf.cast(x, tf.float32), 4, 1.0, 0.001 / 9.0, 0.75), x.dtype),
            LocalResponseNormalization(dtype=dtype),
        ),
        Case(
            "batch norm, resnet20",
            wide,
            norm(keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, dtype=dtype)),
            norm(FusedBatchNormalization(dtype=dtype)),
        ),
        Case(
            "shortcut, resnet20",
            wide,
            lambda x: tf.pad(x[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [8, 8]]),
            PadShortcut(32, dtype=dtype),
        ),
    ]


def measure(case: Case, repeats: int, precision: str) -> tuple[list[float], list[float]]:
    """Seconds of the plain way and of the project's own, pair by pair, each of them first in every second pair."""
    import tensorflow as tf

    images = tf.cast(tf.random.stateless_normal(case.shape, (3, 4)), precision)
    upstream = tf.cast(tf.random.stateless_normal(case.own(images).shape, (5, 6)), precision)
    ways = [_with_gradient(way) for way in (case.plain, case.own)]
    taken: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 2):  # the first ones trace and warm up
        for i in (0, 1) if repeat % 2 else (1, 0):
            began = time.perf_counter()
            ways[i](images, upstream).numpy()
            if repeat >= 2:
                taken[i].append(time.perf_counter() - began)
    return taken


def _with_gradient(way: Way) -> Callable[[Any, Any], Any]:
    """A graph of the gradients of images and weights, of which one number each is fetched: fetching all takes time."""
    import tensorflow as tf

    def both(images: Any, upstream: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(images)
            result = way(images)
        gradients = tape.gradient(result, [images, *tape.watched_variables()], upstream)
        return tf.stack([tf.cast(tf.reshape(gradient, [-1])[0], tf.float32) for gradient in gradients])

    return tf.function(both, autograph=False)


def row(case: Case, plain: list[float], own: list[float]) -> str:
    """Of the table, in Markdown."""
    images = " x ".join(map(str, case.shape))
    low, middle, high = statistics.quantiles([mine / other for mine, other in zip(own, plain, strict=True)], n=4)
    times = " | ".join(f"{1000 * statistics.median(each):,.1f}" for each in (plain, own))
    return f"| {case.name} | {images} | {times} | {middle:.2f} ({low:.2f} to {high:.2f}) |"


if __name__ == "__main__":
    main()
