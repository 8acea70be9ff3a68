"""A small net that learns fast: a whitened first layer, and three wide blocks, two of them residual."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvd_cifar.models.convolution import QuickConv2D
from hvd_cifar.models.layers import FusedBatchNormalization, QuickGelu, SteadyMaxPooling2D
from hvd_cifar.models.recipe import Batch, Recipe
from hvd_cifar.optim.muon import Muon
from hvd_cifar.optim.schedules import ToZero

PATCH = 2  # pixels, the side of the whitened patches
WIDTHS = (64, 256, 256)
RESIDUAL = (1, 3)  # blocks with a third convolution; in the second block it would cost twice as much as in these two
REFERENCE_BATCH = 1024
KERNEL_RATE = 0.24  # Muon's update of a kernel does not depend on the size of its gradient
# Rates of batch norms' offsets and of the logits. airbench94's are for a sum over the batch; this loss is a mean.
OFFSET_RATE = 0.053 * REFERENCE_BATCH
LOGITS_RATE = 0.67 * REFERENCE_BATCH


def muon(learning_rate: float) -> Muon:
    """Muon for kernels of convolutions; the rates of batch norms' offsets and of the logits are proportional to its."""
    others = {"": (OFFSET_RATE / KERNEL_RATE, 0.0), "logits": (LOGITS_RATE / KERNEL_RATE, 0.0)}
    return Muon(learning_rate, momentum=0.6, others=others)


# After airbench94 (Jordan 2024) and its record with Muon; docs/fast.md says what differs, and why.
RECIPE = Recipe(
    optimizer=muon,
    learning_rate=KERNEL_RATE,
    schedule=ToZero(),
    batch=Batch(REFERENCE_BATCH, is_global=True),
    epochs=10,
    precision=None,
    augmentation="fast",
    weight_decay=3e-6,
    decayed=lambda variable: variable.path == "logits/kernel",  # batch norm makes the other kernels' norms irrelevant
    label_smoothing=0.2,
    lookahead=True,
    image_scales=(0.75, 0.75, 1),
    test_time_augmentation=True,
    evaluation_epochs=3,  # one evaluation takes up to a tenth of an epoch
    embedded_epochs=0.35,  # reaches 94%
)


@keras.saving.register_keras_serializable(package="hvd_cifar")
class Dirac(keras.initializers.Initializer):
    """Uniform weights, but the first output channels pass the input channels on unchanged.

    Kernels [3, 3, in, out]. Of more inputs than outputs the first are passed on. The rest is uniform within
    1 / sqrt(fan in), as PyTorch's default is.
    """

    def __call__(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        """float [height, width, in, out]."""
        height, width, inputs, outputs = shape
        bound = (height * width * inputs) ** -0.5
        kernel = keras.random.uniform(shape, -bound, bound, dtype=dtype)
        identity = np.zeros((height, width, inputs, inputs))
        identity[height // 2, width // 2] = np.eye(inputs)
        return tf.concat([tf.cast(identity[..., :outputs], kernel.dtype), kernel[..., inputs:]], axis=-1)


@keras.saving.register_keras_serializable(package="hvd_cifar")
class Whitening(keras.layers.Conv2D):
    """A convolution whose fixed kernel makes the values of a patch uncorrelated; `adapt` makes it from images."""

    def adapt(self, images: NDArray[np.floating[Any]]) -> None:
        """Make the kernel; see `whitening`."""
        self.kernel.assign(whitening(images))


def whitening(images: NDArray[np.floating[Any]], epsilon: float = 5e-4) -> NDArray[np.float32]:
    """The kernel float32 [2, 2, channels, 8 channels] that makes the values of a 2 x 2 patch uncorrelated.

    Its filters are the eigenvectors of the patches' covariance, each divided by the square root of its eigenvalue plus
    `epsilon`, and their negatives. `images` are float [n, height, width, channels], standardised.
    """
    _, height, width, channels = images.shape
    places = [(i, j) for i in range(PATCH) for j in range(PATCH)]
    views = [images[:, i : i + height - PATCH + 1, j : j + width - PATCH + 1] for i, j in places]
    patches = np.stack(views, axis=3).reshape(-1, channels * PATCH**2).astype(np.float64)
    values, vectors = np.linalg.eigh(patches.T @ patches / len(patches))
    # Each vector's sign is arbitrary; fix it, so that all machines make the same kernel.
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(vectors.shape[1])])
    filters = vectors / np.sqrt(values + epsilon)
    both = np.concatenate([filters, -filters], axis=1)
    return both.reshape(PATCH, PATCH, channels, -1).astype(np.float32)


def build(image_shape: tuple[int, int, int], classes: int) -> keras.Model:
    """A net after airbench94's, in Keras, for images of any size from 8 pixels on, 10 with the recipe's scales.

    - A fixed convolution whitens 2 x 2 patches (`whitening` makes its kernel from images), then GELU.
    - Three blocks: 3 x 3 convolution, maximum over 2 x 2, batch norm without scale, GELU; and the same without maximum.
    - In `RESIDUAL` blocks a third convolution and batch norm, to which the first GELU's output is added before GELU.
    - The maximum over the rest of the image, divided by the number of features; logits without an offset.

    At 10 classes it has 2,598,336 trainable parameters.

    Source: Jordan, "94% on CIFAR-10 in 3.29 seconds on a single GPU", 2024, sections 3.1 and 3.2, and the residual
    blocks of its airbench96.
    """

    def norm(x: Any, name: str) -> Any:
        return FusedBatchNormalization(scale=False, name=name)(x)

    def gelu(x: Any, name: str) -> Any:
        return QuickGelu(name=name)(x)

    def conv(x: Any, filters: int, name: str) -> Any:
        return QuickConv2D(filters, 3, padding="same", use_bias=False, kernel_initializer=Dirac(), name=name)(x)

    images = keras.Input((None, None, image_shape[-1]), name="images")
    # This layer learns no offset, so that backward ends before it, and omits the widest gradient of all.
    # Padding keeps sides of 32, 16, 8 and 4 pixels, which whole tiles of 4 x 4 outputs cover (kernels/native).
    filters = 2 * image_shape[-1] * PATCH**2  # each eigenvector of the patches' covariance, and its negative
    x = Whitening(filters, PATCH, padding="same", use_bias=False, trainable=False, name="whiten")(images)
    x = gelu(x, "whiten_gelu")
    for block, width in enumerate(WIDTHS, start=1):
        x = conv(x, width, f"block{block}_conv1")
        x = SteadyMaxPooling2D(2, name=f"block{block}_pool")(x)
        x = shortcut = gelu(norm(x, f"block{block}_norm1"), f"block{block}_gelu1")
        x = gelu(norm(conv(x, width, f"block{block}_conv2"), f"block{block}_norm2"), f"block{block}_gelu2")
        if block in RESIDUAL:
            x = norm(conv(x, width, f"block{block}_conv3"), f"block{block}_norm3")
            x = gelu(keras.layers.Add(name=f"block{block}_add")([x, shortcut]), f"block{block}_gelu3")
    x = SteadyMaxPooling2D(name="pool")(x)
    x = keras.layers.Rescaling(1.0 / WIDTHS[-1], name="scale")(x)
    initial = keras.initializers.RandomNormal(stddev=1.0)
    logits = keras.layers.Dense(classes, use_bias=False, kernel_initializer=initial, name="logits")(x)
    return keras.Model(images, logits, name="fast")
