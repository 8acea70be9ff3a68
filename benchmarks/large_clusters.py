"""What the model of `benchmark predict` says of large clusters: Horovod's published curve, and this project's nets.

    python -m benchmarks.large_clusters published       # 128 hosts of 4 P100, 25 Gbit/s
    python -m benchmarks.large_clusters own --step-ms 5   # hosts of 8 GPUs, 25 Gbit/s

Gradients become ready from the last layer on, each after its layer's part of the multiplications. A third of a step is
the forward pass. Nothing here is measured: step times and networks are given.
"""

from __future__ import annotations

import math
from typing import Any

import click
import numpy as np

from benchmarks import nets, setting
from hvd_cifar.distributed.overlap import Backward, choose, seconds_with
from hvd_cifar.tools.benchmark.fits import Fit, Layout
from hvd_cifar.tools.benchmark.predict import Network

FLOAT_BYTES = 4
# Nets of Keras: side of their images, and images/s of one P100 without communication. Inception V3 and VGG-16 with 64
# images, from TensorFlow's published benchmarks of 2017. ResNet-101's is a sixteenth of the 1,656.82 that Horovod's
# documentation shows for 16 GPUs: one GPU alone is somewhat faster.
PUBLISHED = {"InceptionV3": (299, 142.0, 0.90), "ResNet101": (224, 103.6, 0.90), "VGG16": (224, 154.0, 0.68)}
OWN = {"tutorial": 24, "resnet20": 32, "resnet56": 32, "fast": 32}  # side of their images
BATCH = 64
FUSION = 2**26  # Horovod's fusion buffer, bytes
CYCLE = 5e-3  # Horovod's default cycle time in 2017 and 2018, seconds
NOW_CYCLE = 1e-3  # and in version 0.28, which this project keeps on GPUs
LINK = 25e9 / 8  # bytes a second
NVLINK = 100e9
HOP, LOCAL_HOP = 20e-6, 5e-6  # of a message between hosts over TCP, and between GPUs of a host: assumed


def backward_of(model: Any, side: int, step: float) -> Backward:
    """The gradients of a Keras model for images of `side` pixels, in a step of `step` seconds."""
    import keras

    layers = [layer for layer in model.layers if layer.trainable_variables][::-1]
    outputs = keras.Model(model.input, [layer.output for layer in layers])(np.zeros((1, side, side, 3), "float32"))
    sizes, work = [], []
    for layer, output in zip(layers, outputs, strict=True):
        positions = math.prod(output.shape[1:-1])  # 1 for a dense layer
        for variable in reversed(layer.trainable_variables):
            values = math.prod(variable.shape)
            sizes.append(values * FLOAT_BYTES)
            work.append(values * positions if len(variable.shape) > 1 else 0)
    ready = np.cumsum(work) / sum(work) * step * 2 / 3
    return Backward(step / 3, tuple(ready.tolist()), tuple(sizes))


def network(cycle: float, share: float, local_bandwidth: float) -> Network:
    """A network on which all-reduces reach `share` of the link's bandwidth."""
    return Network(Fit(cycle, HOP, 1 / (LINK * share), LOCAL_HOP, 1 / local_bandwidth))


@click.group(help=(__doc__ or "").splitlines()[0])
def main() -> None:
    """See the module."""


@main.command()
@setting.one_line_for_users()
def published() -> None:
    """Efficiency on 512 GPUs in 2017 and 2018, beside the published one."""
    import keras

    shares = (1.0, 0.75, 0.5)
    print(
        "| net | gradients, MB | step, ms | " + " | ".join(f"at {s:.0%} of the link" for s in shares) + " | published |"
    )
    print("|---" * (4 + len(shares)) + "|")
    for name, (side, rate, said) in PUBLISHED.items():
        model = getattr(keras.applications, name)(weights=None, input_shape=(side, side, 3))
        step = BATCH / rate
        backward = backward_of(model, side, step)
        found = [
            step / seconds_with(backward, network(CYCLE, share, 10e9).link(Layout(128, 4)), FUSION) for share in shares
        ]
        cells = [f"{sum(backward.sizes) / 1e6:.0f}", f"{step * 1e3:.0f}", *(f"{e:.2f}" for e in found), f"{said:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


@main.command()
@click.option(
    "--step-ms", type=click.FloatRange(0.1), default=5.0, help="Computation of a rank's step.", show_default=True
)
@setting.one_line_for_users()
def own(step_ms: float) -> None:
    """Efficiency of this project's nets on 8, 64 and 512 GPUs, 8 a host."""
    seconds = step_ms / 1e3
    many = (8, 64, 512)
    print("| net | gradients, MB | " + " | ".join(f"{n} GPUs" for n in many) + " | in one message |")
    print("|---" * (3 + len(many)) + "|")
    for name, side in OWN.items():
        backward = backward_of(nets.build(name, side).model, side, seconds)
        links = [network(NOW_CYCLE, 0.75, NVLINK).link(Layout.filled(n, 8)) for n in many]
        found = [seconds / choose(backward, link).seconds for link in links]
        last = seconds / seconds_with(backward, links[-1], None)
        cells = [f"{sum(backward.sizes) / 1e6:.1f}", *(f"{e:.2f}" for e in found), f"{last:.2f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
