"""What each special path for speed brings to a whole training step: with it and without it, in turns.

    python -m benchmarks.paths --data-dir D --model fast --precision float32 --batch-size 512
    python -m benchmarks.paths --data-dir D --model resnet20 --precision mixed_bfloat16

One rank on one thread, fed from memory. A row is a path that the preset takes on this machine, and the step with the
path divided by the step without it, pair by pair. House rule: a path stays where that is 0.97 or less on some machine.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click

from benchmarks import setting
from benchmarks.peers.rates import paired, spread
from hvd_cifar.config import TrainSettings, make
from hvd_cifar.runtime.environment import prepare_tensorflow

prepare_tensorflow(os.environ)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

Switch = Callable[[ExitStack], None]  # leaves a path out until the stack closes


@click.command(help=(__doc__ or "").splitlines()[0], context_settings={"show_default": True})
@click.option("--data-dir", type=Path, required=True, help="Folder with binary CIFAR-10.")
@click.option("--model", default="fast")
@click.option("--precision", default="float32")
@click.option("--batch-size", type=click.IntRange(1), default=128)
@click.option("--pairs", type=click.IntRange(3), default=15)
@setting.one_line_for_users()
def main(data_dir: Path, model: str, precision: str, batch_size: int, pairs: int) -> None:
    """Measure, then print a table in Markdown."""
    from hvd_cifar.runtime.world import session
    from hvd_cifar.tools.benchmark.step import Bench

    given = {"model": model, "precision": precision, "batch_size": batch_size, "dataset": "cifar10"}
    settings = make(TrainSettings, {**given, "data_dir": str(setting.real_data(data_dir))})
    with session(threads=1) as alone:

        def step_without(switch: Switch | None) -> Any:
            with ExitStack() as stack:
                if switch:
                    switch(stack)
                step = partial(Bench(alone, settings).repeat, "step")
                step(2)  # the path is chosen while the graph is made
            return step

        whole = step_without(None)
        print("| path | step without it, ms | with it, ms | with / without, median (quartiles) |")
        print("|---|---|---|---|")
        for name, switch in switches().items():
            print(row(name, *measure(step_without(switch), whole, pairs)), flush=True)
    print(f"\n{model}, {precision}, {batch_size} images, n = {pairs} pairs; {setting.about()}")


def switches() -> dict[str, Switch]:
    """By name of the path: what leaves it out."""
    import keras
    import tensorflow as tf

    from hvd_cifar.kernels import compiled, side_by_side, winograd
    from hvd_cifar.models import layers, resnet

    def put(target: Any, name: str, value: Any) -> Switch:
        return lambda stack: stack.enter_context(mock.patch.object(target, name, value))

    def plain_relu(terms: Any, copies: int) -> Any:
        return (tf.nn.relu(terms[0] + terms[1] if len(terms) > 1 else terms[0]),) * copies

    def cast(stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(layers, "narrow", tf.cast))
        for name, function in list(vars(layers).items()):
            if hasattr(function, "python_function"):  # its traces hold the path
                anew = tf.function(function.python_function, jit_compile=True, autograph=False)
                stack.enter_context(mock.patch.object(layers, name, anew))

    def plain_layer(module: Any, name: str, plain: Any) -> Switch:
        return put(getattr(module, name), "call", plain)

    def plain_norm(layer: Any, images: Any, training: bool = False) -> Any:
        mean, variance = tf.nn.moments(tf.cast(images, tf.float32), [0, 1, 2])
        layer.moving_mean.assign(layer.momentum * layer.moving_mean + (1 - layer.momentum) * mean)
        layer.moving_variance.assign(layer.momentum * layer.moving_variance + (1 - layer.momentum) * variance)
        scale = layer.gamma * tf.math.rsqrt(variance + layer.epsilon)
        return tf.cast((tf.cast(images, tf.float32) - mean) * scale + layer.beta, images.dtype)

    def plain_response(layer: Any, images: Any) -> Any:
        found = tf.nn.local_response_normalization(tf.cast(images, tf.float32), 4, layer.bias, layer.alpha, 0.75)
        return tf.cast(found, images.dtype)

    def strided_shortcut(layer: Any, images: Any) -> Any:
        missing = layer.filters - images.shape[-1]
        return tf.pad(images[:, ::2, ::2], [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])

    return {
        "kernels/compiled": put(compiled, "is_quicker", lambda *_: False),
        "kernels/winograd": put(winograd, "LEAST_WEIGHTS", 10**9),
        "kernels/side_by_side": put(side_by_side, "MOST_PIXELS", 0),
        "layers.narrow": cast,
        "QuickRelu": put(layers, "_fused_relu", plain_relu),
        "QuickGelu": plain_layer(layers, "QuickGelu", lambda _, x: keras.activations.gelu(x)),
        "FusedBatchNormalization": plain_layer(layers, "FusedBatchNormalization", plain_norm),
        "LocalResponseNormalization": plain_layer(layers, "LocalResponseNormalization", plain_response),
        "PadShortcut": plain_layer(resnet, "PadShortcut", strided_shortcut),
    }


def measure(without: Any, whole: Any, pairs: int) -> tuple[list[float], list[float]]:
    """Seconds of a step without a path and of the whole, pair by pair, each of them first in every second pair."""
    taken: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):  # the first one warms up
        for i in (0, 1) if pair % 2 else (1, 0):
            began = time.perf_counter()
            (without, whole)[i](2)
            if pair:
                taken[i].append((time.perf_counter() - began) / 2)
    return taken


def row(name: str, without: list[float], whole: list[float]) -> str:
    """Of the table, in Markdown."""
    times = " | ".join(f"{1000 * statistics.median(each):,.1f}" for each in (without, whole))
    return f"| {name} | {times} | {spread(paired(whole, without))} |"


if __name__ == "__main__":
    main()
