"""The CIFAR ResNets of He et al. 2015: 6n + 2 layers."""

from __future__ import annotations

import keras

from hvd_cifar.models.layers import FusedBatchNormalization, PadShortcut


def build(
    depth: int,
    classes: int,
    dtype: keras.DTypePolicy,
    normalization: type[FusedBatchNormalization] = FusedBatchNormalization,
) -> keras.Model:
    """Three stages of n residual blocks with 16, 32 and 64 filters, parameter-free shortcuts (option A).

    Source: He, Zhang, Ren, Sun: Deep residual learning for image recognition, 2015, section 4.2. At 10 classes depth 20
    has 269,722 trainable parameters, depth 32 has 464,154, depth 56 has 853,018 (0.27, 0.46 and 0.85 million there).

    Args:
        depth: 6n + 2: 20, 32, 44, 56, ...
        normalization: the layer for batch norm.

    Returns:
        A model from images float [b, h, w, 3] to logits [b, classes], in the policy's compute type.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ValueError(f"a CIFAR ResNet has 6n + 2 layers, not {depth}")
    blocks = (depth - 2) // 6

    def conv(x: keras.KerasTensor, filters: int, stride: int, name: str) -> keras.KerasTensor:
        return keras.layers.Conv2D(
            filters, 3, stride, "same", use_bias=False, kernel_initializer="he_normal", dtype=dtype, name=name
        )(x)

    def norm(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        return normalization(dtype=dtype, name=name)(x)

    def relu(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        return keras.layers.ReLU(dtype=dtype, name=name)(x)

    def block(x: keras.KerasTensor, filters: int, stride: int, name: str) -> keras.KerasTensor:
        shortcut = x if stride == 1 else PadShortcut(filters, dtype=dtype, name=f"{name}_shortcut")(x)
        x = relu(norm(conv(x, filters, stride, f"{name}_conv1"), f"{name}_norm1"), f"{name}_relu1")
        x = norm(conv(x, filters, 1, f"{name}_conv2"), f"{name}_norm2")
        x = keras.layers.Add(dtype=dtype, name=f"{name}_add")([x, shortcut])
        return relu(x, f"{name}_relu2")

    images = keras.Input((None, None, 3), dtype=dtype.compute_dtype, name="images")
    x = relu(norm(conv(images, 16, 1, "conv"), "norm"), "relu")
    for stage, filters in enumerate((16, 32, 64), start=1):
        for i in range(1, blocks + 1):
            x = block(x, filters, 2 if stage > 1 and i == 1 else 1, f"stage{stage}_block{i}")
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype, name="pool")(x)
    logits = keras.layers.Dense(classes, kernel_initializer="he_normal", dtype=dtype, name="logits")(x)
    return keras.Model(images, logits, name=f"resnet{depth}")
