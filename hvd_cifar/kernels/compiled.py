"""Convolutions that set-up compiled (native/): whether they are there, and as TensorFlow's operations."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

LIBRARY = Path("lib", "hvd_cifar", "libconvolutions.so")  # within the environment, where install/ puts it
# Channels, of images and of outputs, from which on it is quicker than oneDNN: transforms are for each channel, products
# for each pair of channels. Dots: where the processor sums products of bfloat16 (native/dots.cc).
LEAST_CHANNELS = {"float32": 16, "bfloat16": 24, "bfloat16, dots": 16}
# Weights too many for a core's cache, for each of a few tiles: `winograd` and oneDNN are quicker with them, dots not
# slower.
MOST_WEIGHTS, LEAST_PIXELS = 200_000, 8


@functools.cache
def operations() -> Any:
    """The library's operations; None where there are none: not compiled, or no processor for them.

    Those are x86 with AVX2, or AVX-512. `HVD_CIFAR_VECTORS` (512, 256 or 0 bits) has them do with less, or not run;
    `HVD_CIFAR_DOTS=0` without sums of bfloat16's products (AVX512-BF16), which are quicker and less exact.
    """
    path = Path(sys.prefix) / LIBRARY
    if not path.exists():
        return None
    try:
        made = tf.load_op_library(str(path))
    except tf.errors.NotFoundError:  # of another TensorFlow
        return None
    return made if told("vectors") else None


def about() -> str:
    """Whose convolutions a run takes, in words for its record."""
    if operations() is None:
        return "TensorFlow's"
    dots = ", bfloat16 by sums of products" if told("dots") and not told("tiles") else ""
    return f"compiled, vectors of {told('vectors')} bits{dots}"


def is_quicker(height: int, width: int, shape: tuple[int, ...], dtype: str) -> bool:
    """Whether `convolve` is there for a kernel of `shape` [r, r, c, f] on height x width pixels, and quicker.

    Not in bfloat16 where the processor multiplies that in tiles (AMX).
    """
    *taps, channels, filters = shape
    if taps not in ([3, 3], [5, 5]) or dtype not in LEAST_CHANNELS or operations() is None:
        return False
    if dtype == "bfloat16" and told("tiles"):
        return False
    dots = dtype == "bfloat16" and told("dots")
    if taps == [5, 5] and not dots:
        return False
    if min(channels, filters) < LEAST_CHANNELS[f"{dtype}, dots" if dots else dtype]:
        return False
    return bool(dots) or 9 * channels * filters <= MOST_WEIGHTS or min(height, width) >= LEAST_PIXELS


def told(question: str) -> int:
    """What the library has found out of the processor: bits of its `vectors`, whether it has `dots` or `tiles`."""
    return int(getattr(ctypes.CDLL(str(Path(sys.prefix) / LIBRARY)), f"hvd_cifar_{question}")())


def convolve(images: Any, kernel: Any) -> Any:
    """Convolution of stride 1, padded with zeros, as `tf.nn.conv2d` has it but for rounding.

    Sums are float32's in both types. Errors are twice `tf.nn.conv2d`'s in float32. In bfloat16 they are those of
    rounding the result, 0.2% of its typical size; with sums of bfloat16's products 1.2%, since what is multiplied is
    rounded, too. An infinity or NaN spreads over the outputs (4 x 4, or 2 x 2) of each tile that sees it. Results do
    not hang on the number of threads, and those of an image not on what else is in its batch.

    Args:
        images: float32 or bfloat16 [b, h, w, c].
        kernel: of the same type, [3, 3, c, f], or [5, 5, c, f] for sums of bfloat16's products.

    Returns:
        [b, h, w, f].
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
