"""Convolutions that set-up compiled: TensorFlow's values and gradients, the same bits with any threads and vectors."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvd_cifar.kernels import compiled
from tests.ranks import CHECKOUT

CPUINFO = Path("/proc/cpuinfo").read_text()
there = pytest.mark.skipif(
    platform.machine() != "x86_64" or " avx2" not in CPUINFO, reason="compiled for processors with AVX2"
)
DOTS = " avx512_bf16" in CPUINFO
# Whole tiles of 4 x 4 and of 3 x 3 outputs, parts of them, less than one; channels that fill vectors, and that do not;
# as many tiles as have parts.
SHAPES = [
    (2, 8, 8, 16, 16),
    (3, 7, 5, 24, 40),
    (1, 1, 1, 3, 5),
    (5, 9, 14, 17, 33),
    (1, 4, 4, 128, 48),
    (70, 16, 23, 16, 32),
    (4, 6, 5, 256, 256),
    (130, 9, 9, 40, 16),
]


def draw(shape: tuple[int, ...], dtype: Any, taps: int = 3) -> list[Any]:
    """Images, kernel, and a gradient of outputs."""
    images, height, width, channels, filters = shape
    numbers = np.random.default_rng(7)
    sizes = (images, height, width, channels), (taps, taps, channels, filters), (images, height, width, filters)
    return [tf.cast(numbers.normal(size=size), dtype) for size in sizes]


def both_ways(convolve: Any, images: Any, kernel: Any, upstream: Any) -> list[Any]:
    """Outputs, gradients of images and of the kernel, in float64."""

    def run(x: Any, weights: Any, change: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch([x, weights])
            made = convolve(x, weights)
        return [made, *tape.gradient(made, [x, weights], change)]

    results = tf.function(run, autograph=False)(images, kernel, upstream)
    return [tf.cast(value, tf.float64).numpy() for value in results]


def plain(images: Any, kernel: Any) -> Any:
    return tf.nn.conv2d(images, kernel, 1, "SAME")


@there
def test_set_up_compiled_them() -> None:
    assert compiled.operations() is not None
    dots = ", bfloat16 by sums of products" if DOTS and " amx_tile" not in CPUINFO else ""
    assert compiled.about() == f"compiled, vectors of {512 if ' avx512f' in CPUINFO else 256} bits{dots}"


bfloat16 = pytest.param("bfloat16", marks=pytest.mark.skipif(not DOTS, reason="no sums of bfloat16's products here"))


@there
@pytest.mark.parametrize(("dtype", "taps"), [("float32", 3), *([("bfloat16", 3), ("bfloat16", 5)] if DOTS else [])])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_the_convolution_s(shape: tuple[int, ...], dtype: str, taps: int) -> None:
    given = draw(shape, dtype, taps)
    exact = both_ways(plain, *(tf.cast(value, tf.float64) for value in given))
    for ours, right in zip(both_ways(compiled.convolve, *given), exact, strict=True):
        assert ours.shape == right.shape
        typical = np.sqrt((right**2).mean())
        if dtype == "bfloat16":
            # Operands have 8 bits. Of the smallest images most of a 5 x 5 kernel sees nothing but padding.
            usual, largest = (0.06, 0.35) if taps == 5 and shape[1] < 5 else (0.016, 0.15)
            assert np.sqrt(((ours - right) ** 2).mean()) < usual * typical
            np.testing.assert_allclose(ours, right, rtol=2**-8, atol=largest * typical)
            continue
        np.testing.assert_allclose(ours, right, rtol=0, atol=3e-5 * typical)  # what sums of thousands lose


@there
@pytest.mark.parametrize("dtype", ["float32", bfloat16])
@pytest.mark.parametrize("filters", [16, 17, 48])
def test_an_image_s_outputs_do_not_depend_on_its_batch(filters: int, dtype: str) -> None:
    images, kernel, _ = draw((70, 15, 14, 24, filters), dtype)
    whole = compiled.convolve(images, kernel)
    for first, last in ((0, 70), (3, 4), (11, 60)):
        assert np.array_equal(compiled.convolve(images[first:last], kernel), whole[first:last])


@there
@pytest.mark.parametrize("dtype", ["float32", bfloat16])
def test_what_is_not_finite_stays_so_and_no_images_have_a_gradient_of_zeros(dtype: str) -> None:
    images, kernel, upstream = draw((2, 8, 8, 16, 16), "float32")
    for wrong in (np.nan, np.inf, -np.inf):
        spoilt = images.numpy()
        spoilt[1, 5, 2, 3] = wrong
        given = [tf.cast(value, dtype) for value in (spoilt, kernel, upstream)]
        outputs, _, of_kernel = both_ways(compiled.convolve, *given)
        assert not np.isfinite(outputs[1, 4:7, 1:4]).any() and np.isfinite(outputs[0]).all()
        assert not np.isfinite(of_kernel[:, :, 3]).any()
    outputs, _, of_kernel = both_ways(compiled.convolve, *draw((0, 8, 8, 16, 16), dtype))
    assert outputs.shape == (0, 8, 8, 16) and of_kernel.shape == (3, 3, 16, 16) and not of_kernel.any()


def own_digests() -> Iterator[str]:
    """Of all results, by this process."""
    assert compiled.operations()  # before `told`: TensorFlow lists what loading the library registers
    for dtype, taps in [("float32", 3)] + [("bfloat16", 3), ("bfloat16", 5)] * compiled.told("dots"):
        for shape in SHAPES:
            values = both_ways(compiled.convolve, *draw(shape, dtype, taps))
            yield f"{dtype} {hashlib.sha256(b''.join(value.tobytes() for value in values)).hexdigest()}"


DIGESTS = """
import tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads({threads})
from tests.single.test_compiled import *
print(*own_digests(), sep="\\n")
"""


def digests(threads: int, vectors: int) -> list[str]:
    """Of all results, by a process with a number of threads and vectors of a number of bits."""
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "HVD_CIFAR_VECTORS": str(vectors)}
    words = [sys.executable, "-c", DIGESTS.format(threads=threads)]
    return subprocess.check_output(words, env=env, cwd=CHECKOUT, text=True).splitlines()


@there
def test_the_same_bits_with_any_threads_and_vectors() -> None:
    own = list(own_digests())
    assert len(own) == (3 if DOTS else 1) * len(SHAPES)
    assert digests(5, 512) == own
    assert digests(1, 256) == own[: len(SHAPES)]  # AVX2 computes float32 alone


def test_without_the_library_or_with_one_of_another_tensorflow_there_are_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert compiled.operations.__wrapped__() is None
    (tmp_path / compiled.LIBRARY).parent.mkdir(parents=True)
    (tmp_path / compiled.LIBRARY).write_bytes(b"\x7fELF of somebody else's")
    assert compiled.operations.__wrapped__() is None
