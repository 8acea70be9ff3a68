"""The embedded data set: ten kinds of figures, drawn by a seeded program into CIFAR-10's binary layout.

It replaces CIFAR-10 where there is no network. Every image shows one figure (a disc, a ring, a square, ...) of random
place, size, proportions, tilt and colour, lighter than its background, with strokes of other colours behind and across
it, and noise. The class is the kind of figure. All kinds cover the same area and have the same colours, so neither mean
nor colour tells them apart. The usual augmentations keep the class. The tutorial net reaches a test accuracy of 96% in
three epochs (`python -m hvd_cifar train --dataset synthetic --model tutorial --global-batch-size 256 --epochs 3`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvd_cifar.data.cifar import CHANNELS, CIFAR10, SIDE
from hvd_cifar.data.host_files import Onlooker

Floats = NDArray[np.floating[Any]]  # float32 throughout

IMAGES_AT_ONCE = 500  # fits a core's cache. Another number would draw other images: it orders the random bits.
STROKES_BEHIND, STROKES_ACROSS = 6, 1


def _radius(u: Floats, v: Floats) -> Floats:
    return np.sqrt(u * u + v * v)


def _box(u: Floats, v: Floats) -> Floats:
    return np.maximum(np.abs(u), np.abs(v))


def _three(w: Floats) -> Floats:
    """Three strips across the axis of w."""
    return np.minimum(np.abs(w), np.abs(np.abs(w) - 0.715)) - 0.185


# Each figure as its signed distance (negative inside) from coordinates u (right) and v (down). All have the area 2.
FIGURES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "disc": lambda u, v: _radius(u, v) - 0.798,
    "ring": lambda u, v: np.abs(_radius(u, v) - 0.78) - 0.204,
    "square": lambda u, v: _box(u, v) - 0.707,
    "frame": lambda u, v: np.abs(_box(u, v) - 0.7285) - 0.1715,
    "triangle": lambda u, v: np.maximum(v - 0.65, (1.9 * np.abs(u) - 1.05 * (v + 1.25)) / 2.171),
    "plus": lambda u, v: np.maximum(np.minimum(np.abs(u), np.abs(v)) - 0.293, _box(u, v) - 1),
    "cross": lambda u, v: FIGURES["plus"]((u + v) / 2**0.5, (u - v) / 2**0.5),
    "bars": lambda u, v: np.maximum(np.abs(u) - 0.9, _three(v)),
    "pillars": lambda u, v: np.maximum(np.abs(v) - 0.9, _three(u)),
    "checker": lambda u, v: np.maximum(_box(u, v) - 1, np.maximum(np.minimum(u, v), -np.maximum(u, v))),
}


def draw(folder: Path, onlooker: Onlooker) -> Path:
    """Draw the set into a folder, in seconds, and return the folder. Every machine draws the same bytes.

    It holds 50,000 + 1,000 examples, each class equally often in every file, and a file with the names of the classes.
    """
    for number, name in enumerate(LAYOUT.files):
        (folder / name).write_bytes(draw_file(number).data)
        onlooker.is_told()
    (folder / LAYOUT.names_file).write_text("".join(f"{name}\n" for name in FIGURES))
    return folder


# Under this folder's name the images never change: a test compares their checksum.
# Its accuracies say nothing about CIFAR-10, so a small test set is enough.
LAYOUT = replace(
    CIFAR10,
    name="synthetic",
    title="the synthetic set",
    folder="synthetic-v2",
    test={"test_batch.bin": 1000},
    draw=draw,
)


def draw_file(number: int) -> NDArray[np.uint8]:
    """The records of file `number` (0 to 5; 5 is the test set), uint8 [10,000 or 1,000, 3,073]."""
    # NumPy keeps the raw bits of a bit generator stable, but not distributions and permutations. All else here is
    # arithmetic that IEEE 754 rounds correctly (+ - * / sqrt), the same on every machine.
    bits = np.random.PCG64(number)
    count = LAYOUT.bytes_of(LAYOUT.files[number]) // LAYOUT.record_bytes
    records = np.empty((count, LAYOUT.record_bytes), np.uint8)
    in_turn = np.arange(count) % LAYOUT.classes
    records[:, 0] = in_turn[np.argsort(bits.random_raw(len(records)), kind="stable")]
    for first in range(0, len(records), IMAGES_AT_ONCE):
        rows = slice(first, first + IMAGES_AT_ONCE)
        records[rows, 1:] = _draw(records[rows, 0], bits)
    return records


def _draw(labels: NDArray[np.uint8], bits: np.random.PCG64) -> NDArray[np.uint8]:
    """Images of these classes, uint8 [n, 3 * 32 * 32]: planes of red, green and blue."""
    count = len(labels)

    def between(low: float, high: float) -> Floats:
        """One random number for each image, [n, 1]."""
        raw = bits.random_raw((count, 1)) >> np.uint64(40)
        return low + (high - low) * (raw.astype(np.float32) * np.float32(2.0**-24))

    def colour(low: float, high: float) -> Floats:
        return np.stack([between(low, high) for _ in range(CHANNELS)], axis=1)  # [n, 3, 1]

    def paint(distance: Floats, paint_colour: Floats) -> None:
        """Cover what is inside, with soft edges: `distance` in pixels, [n, 32 * 32]."""
        cover = np.clip(0.5 - distance, 0, 1)[:, None, :]
        image[:] += cover * (paint_colour - image)

    def stroke() -> None:
        u, v = x - between(-16, 16), y - between(-16, 16)
        right, down = between(-1, 1), between(-1, 1)
        length = np.sqrt(right * right + down * down + 1e-6)
        along = np.abs(u * right + v * down) / length - between(2, 12)
        aside = np.abs(v * right - u * down) / length - between(0.6, 3.5)
        paint(np.maximum(along, aside), ground + colour(-90, 90))

    def figure() -> None:
        u, v = x - between(-4.5, 4.5), y - between(-4.5, 4.5)
        tilt = between(-0.25, 0.25)  # tangent: 14 degrees
        length = np.sqrt(1 + tilt * tilt)
        stretch = between(0.8, 1.2)
        radius = between(7.5, 11)  # pixels
        mirror = np.where(between(0, 1) < 0.5, np.float32(-1), np.float32(1))
        right = (u + tilt * v) / length * stretch / radius * mirror
        down = (v - tilt * u) / length / stretch / radius
        distance = np.empty_like(right)
        for label, shape in enumerate(FIGURES.values()):
            rows = np.flatnonzero(labels == label)
            distance[rows] = shape(right[rows], down[rows]) * radius[rows]
        paint(distance, ground + colour(50, 100))

    pixels = np.arange(SIDE**2)
    x = (pixels % SIDE).astype(np.float32) - 15.5
    y = (pixels // SIDE).astype(np.float32) - 15.5
    ground = colour(60, 195)
    image = ground + colour(-3, 3) * (between(-1, 1) * x + between(-1, 1) * y)[:, None, :]
    for _ in range(STROKES_BEHIND):
        stroke()
    figure()
    for _ in range(STROKES_ACROSS):
        stroke()
    # The difference of two uniform bytes: noise of triangular shape, of a strength that varies between images.
    noise = bits.random_raw((2, count, 384)).astype("<u8").view(np.uint8).reshape(2, count, 3, -1).astype(np.float32)
    image += (noise[0] - noise[1]) * between(50 / 255, 90 / 255)[:, :, None]
    return np.clip(image + 0.5, 0, 255).astype(np.uint8).reshape(count, -1)
