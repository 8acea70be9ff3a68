"""TensorFlow operations for the convolutions that set-up compiles (native/)."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

LIBRARY = Path("lib", "hvd_cifar", "libconvolutions.so")  # within the environment; launch/install compiles it there
# The cost of transforms grows with the channels, the cost of products with pairs of channels. With fewer channels the
# transforms dominate, and oneDNN is faster.
LEAST_CHANNELS = 16


@functools.cache
def operations() -> Any:
    """The library's operations; None where it was not compiled, or may use neither AVX2 nor AVX-512."""
    path = Path(sys.prefix) / LIBRARY
    if not path.exists():
        return None
    try:
        made = tf.load_op_library(str(path))
    except tf.errors.NotFoundError:  # compiled for another TensorFlow
        return None
    return made if told("vectors") else None


def about() -> str:
    """The convolution kernels in use, for the run's record."""
    if operations() is None:
        return "TensorFlow's"
    return f"compiled, vectors of {told('vectors')} bits" + ", bfloat16 by sums of products" * sums_bfloat16()


def sums_bfloat16() -> bool:
    """Whether these kernels compute bfloat16: by AVX512-BF16, unless there is AMX, with which oneDNN is faster."""
    return bool(told("dots")) and not told("tiles")


def is_quicker(shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `convolve` computes a kernel of `shape` [r, r, c, f] in `dtype`, and is faster than TensorFlow."""
    *size, channels, filters = shape
    if min(channels, filters) < LEAST_CHANNELS or operations() is None:
        return False
    if dtype == "bfloat16":
        return size in ([3, 3], [5, 5]) and sums_bfloat16()
    return size == [3, 3] and dtype == "float32"


def told(question: str) -> int:
    """A processor feature as the library detects it: bits of its `vectors`, whether it has `dots` or `tiles`."""
    return int(getattr(ctypes.CDLL(str(Path(sys.prefix) / LIBRARY)), f"hvd_cifar_{question}")())


def convolve(images: Any, kernel: Any) -> Any:
    """Convolution of stride 1 with zero padding: [b, h, w, c] with [r, r, c, f] -> [b, h, w, f], as `tf.nn.conv2d`.

    Sums are float32. The errors of float32 are about twice those of `tf.nn.conv2d`; a bfloat16 output's error is 1.2%
    of the outputs' typical size, since the products' operands are also rounded. An infinity or NaN spreads over the
    outputs of each tile that reads it (4 x 4 or 3 x 3, or 2 x 2 for 5 x 5 kernels). Results depend neither on the
    number of threads nor on the rest of the batch.
    """
    made, taps = operations(), kernel.shape[0]

    @tf.custom_gradient
    def convolution(x: Any, weights: Any) -> Any:
        def gradients(upstream: Any) -> tuple[Any, Any]:
            turned = tf.transpose(tf.reverse(weights, [0, 1]), [0, 1, 3, 2])
            of_images = made.hvd_cifar_convolution(images=upstream, kernel=turned)
            return of_images, made.hvd_cifar_kernel_gradient(images=x, gradients=upstream, taps=taps)

        return made.hvd_cifar_convolution(images=x, kernel=weights), gradients

    return convolution(images, kernel)
