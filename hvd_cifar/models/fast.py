"""A small net that learns fast: a whitened first layer, and three wide blocks, two of them residual."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.models.activation import QuickGelu
from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.normalization import FusedBatchNormalization
from hvd_cifar.models.pooling import SteadyMaxPooling2D

PATCH = 2  # pixels, the side of the whitened patches
FILTERS = 2 * 3 * PATCH**2  # each direction of a patch's colour space, and its opposite
WIDTHS = (64, 256, 256)
RESIDUAL = (1, 3)  # blocks with a third convolution: those where it costs least; in the second it would cost twice both
STATISTICS_MOMENTUM = 0.9  # of the moving statistics, per step


@keras.saving.register_keras_serializable(package="hvd_cifar")
class Dirac(keras.initializers.Initializer):
    """Uniform weights, but the first output channels pass the input channels on unchanged.

    Kernels [3, 3, in, out] with out >= in. The rest is uniform within 1 / sqrt(fan in), as PyTorch's default is.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """float [height, width, in, out]."""
        height, width, inputs, outputs = shape
        bound = (height * width * inputs) ** -0.5
        kernel = keras.random.uniform(shape, -bound, bound, dtype=dtype)
        identity = np.zeros((height, width, inputs, inputs))
        identity[height // 2, width // 2] = np.eye(inputs)
        return tf.concat([tf.cast(identity, kernel.dtype), kernel[..., inputs:outputs]], axis=-1)


def whitening(images: NDArray[np.floating[Any]], epsilon: float = 5e-4) -> NDArray[np.float32]:
    """The kernel float32 [2, 2, 3, 24] of the first layer: it makes the 12 values of a patch uncorrelated.

    Its filters are the eigenvectors of the patches' covariance, each divided by the square root of its eigenvalue plus
    `epsilon`, and their negatives.

    Args:
        images: float [n, side, side, 3], standardised, undistorted; some thousands are enough.
    """
    side = images.shape[1] - PATCH + 1
    views = [images[:, i : i + side, j : j + side] for i in range(PATCH) for j in range(PATCH)]
    patches = np.stack(views, axis=3).reshape(-1, 3 * PATCH**2).astype(np.float64)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    # Each vector's sign is arbitrary; fix it, so that all machines make the same kernel.
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])])
    filters = vectors / np.sqrt(values + epsilon)
    both = np.concatenate([filters, -filters], axis=1)
    return both.reshape(PATCH, PATCH, 3, FILTERS).astype(np.float32)


def build(
    classes: int,
    dtype: keras.DTypePolicy,
    normalization: type[FusedBatchNormalization] = FusedBatchNormalization,
) -> keras.Model:
    """A net after airbench94's, in Keras.

    2 x 2 patches are whitened by a fixed convolution (`whitening` makes it, from images); then three blocks, each of a
    3 x 3 convolution, maximum over 2 x 2, normalisation without scale, GELU, and the same again without a maximum; in
    `RESIDUAL` blocks a third convolution and normalisation, to which what went into the second is added before GELU;
    the maximum over what is left of the image; logits without an offset, divided by the number of features. At 10
    classes it has 2,598,336 trainable parameters.

    Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, sections 3.1 and 3.2, and the residual
    blocks of its airbench96.

    Args:
        normalization: the layer for batch norm.

    Returns:
        A model from images float [b, h, w, 3] to logits [b, classes], in the policy's compute type.
    """

    def norm(x: keras.KerasTensor, name: str) -> keras.KerasTensor:
        return normalization(momentum=STATISTICS_MOMENTUM, scale=False, dtype=dtype, name=name)(x)

    def gelu(x: Any, name: str, copies: int = 1) -> Any:
        return QuickGelu(copies, dtype=dtype, name=name)(x)

    def conv(x: keras.KerasTensor, filters: int, name: str) -> keras.KerasTensor:
        return QuickConv2D(
            filters, 3, padding="same", use_bias=False, kernel_initializer=Dirac(), dtype=dtype, name=name
        )(x)

    images = keras.Input((None, None, 3), dtype=dtype.compute_dtype, name="images")
    # Without an offset to learn, backward ends before this layer, and before the widest gradient of all.
    x = keras.layers.Conv2D(FILTERS, PATCH, use_bias=False, trainable=False, dtype=dtype, name="whiten")(images)
    x = gelu(x, "whiten_gelu")
    for block, width in enumerate(WIDTHS, start=1):
        x = conv(x, width, f"block{block}_conv1")
        x = SteadyMaxPooling2D(2, dtype=dtype, name=f"block{block}_pool")(x)
        residual = block in RESIDUAL
        x = gelu(norm(x, f"block{block}_norm1"), f"block{block}_gelu1", copies=2 if residual else 1)
        x, shortcut = x if residual else (x, None)
        x = gelu(norm(conv(x, width, f"block{block}_conv2"), f"block{block}_norm2"), f"block{block}_gelu2")
        if residual:
            x = norm(conv(x, width, f"block{block}_conv3"), f"block{block}_norm3")
            x = gelu([x, shortcut], f"block{block}_gelu3")  # of the sum
    x = SteadyMaxPooling2D(dtype=dtype, name="pool")(x)
    x = keras.layers.Rescaling(1.0 / WIDTHS[-1], dtype=dtype, name="scale")(x)
    logits = keras.layers.Dense(
        classes,
        use_bias=False,
        kernel_initializer=keras.initializers.RandomNormal(stddev=1.0),
        dtype=dtype,
        name="logits",
    )(x)
    return keras.Model(images, logits, name="fast")


DECAYED = "logits/kernel"  # kernels of convolutions keep their length by themselves
