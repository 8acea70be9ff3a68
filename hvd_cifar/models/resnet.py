"""The CIFAR ResNets of He et al. 2015: 6n + 2 layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.layers import FusedBatchNormalization, OwnLayer, QuickRelu
from hvd_cifar.models.recipe import Batch, Recipe
from hvd_cifar.optim.muon import Muon
from hvd_cifar.optim.schedules import Staircase

# He et al. 2015, section 4.2: 0.1, momentum 0.9, a tenth at 32,000 and at 48,000 of 64,000 steps of 128.
PUBLISHED = Recipe(
    learning_rate=0.1,
    batch=Batch(largest=1024),  # with 8,192 examples 12 epochs are 84 steps, which reach 24%
    schedule=Staircase(examples=(32_000 * 128, 48_000 * 128), full_examples=64_000 * 128),
    epochs=164,
    weight_decay=1e-4,
)
# With 1,024 examples, the batch of eight ranks, SGD loses 12 points of accuracy in 12 epochs, and Muon none
# (docs/results.md). Kernels do not decay, since Muon resets their norms. Other variables learn at four times the
# kernels' rate.
LARGE = replace(
    PUBLISHED,
    optimizer=lambda rate: Muon(rate, momentum=0.6, others={"": (4.0, 0.0)}),
    batch=Batch(reference=1024, power=0.5),
    weight_decay=0.0,
)
RECIPE = replace(PUBLISHED, beyond=(256, LARGE))


@keras.saving.register_keras_serializable("hvd_cifar")
class PadShortcut(OwnLayer):
    """The parameter-free shortcut between stages: every second pixel, new channels zero (He et al. 2015, option A)."""

    SETTINGS = ("filters",)

    def __init__(self, filters: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.filters = filters

    def call(self, images: Any) -> Any:
        """[b, h, w, c] -> [b, h / 2, w / 2, filters], rounded up."""
        # Pooling over one pixel equals images[:, ::2, ::2]. On a CPU it takes a tenth of the time, gradient included.
        halved = tf.nn.avg_pool2d(images, ksize=1, strides=2, padding="VALID")
        missing = self.filters - images.shape[-1]
        return tf.pad(halved, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])

    def compute_output_shape(self, input_shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """[b, h / 2, w / 2, filters], rounded up."""
        batch, *sides, _ = input_shape
        return (batch, *(side and (side + 1) // 2 for side in sides), self.filters)


def build(image_shape: tuple[int, int, int], classes: int, depth: int) -> keras.Model:
    """Three stages of n residual blocks with 16, 32 and 64 filters, parameter-free shortcuts (option A).

    Images may have any height and width; `depth` is 6n + 2. At 10 classes depth 20 has 269,722 trainable parameters,
    depth 32 has 464,154, depth 56 has 853,018 (0.27, 0.46 and 0.85 million in the source).

    Source: He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2015, section 4.2.
    """

    def conv(x: Any, filters: int, stride: int, name: str) -> Any:
        return QuickConv2D(filters, 3, stride, "same", use_bias=False, kernel_initializer="he_normal", name=name)(x)

    def norm(x: Any, name: str) -> Any:
        return FusedBatchNormalization(name=name)(x)

    def relu(x: Any, name: str, copies: int = 1) -> Any:
        return QuickRelu(copies, name=name)(x)

    def block(x: Any, shortcut: Any, filters: int, stride: int, name: str) -> Any:
        if stride > 1:
            shortcut = PadShortcut(filters, name=f"{name}_shortcut")(shortcut)
        x = relu(norm(conv(x, filters, stride, f"{name}_conv1"), f"{name}_norm1"), f"{name}_relu1")
        x = norm(conv(x, filters, 1, f"{name}_conv2"), f"{name}_norm2")
        return relu([x, shortcut], f"{name}_relu2", copies=2)  # of the sum; for the next block and its shortcut

    images = keras.Input((None, None, image_shape[-1]), name="images")
    x, shortcut = relu(norm(conv(images, 16, 1, "conv"), "norm"), "relu", copies=2)
    for stage, filters in enumerate((16, 32, 64), start=1):
        for i in range(1, (depth - 2) // 6 + 1):
            stride = 2 if stage > 1 and i == 1 else 1
            x, shortcut = block(x, shortcut, filters, stride, f"stage{stage}_block{i}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    logits = keras.layers.Dense(classes, kernel_initializer="he_normal", name="logits")(x)
    return keras.Model(images, logits, name=f"resnet{depth}")
