"""A data set of your own: grey images of 32 x 32 pixels; the class is the pattern.

    ./run.sh -np 2 train --dataset examples/my_data.py:load

Only `load` is needed. Every rank calls it and must get the same arrays, so a random set has a fixed seed. Images
are uint8 [n, height, width, channels] or [n, height, width], of any size, in memory or mapped (`np.load` with
mmap_mode="r"); labels are integers from 0 on.
"""

import numpy as np
from numpy.typing import NDArray

import hvd_cifar

PATTERNS = ("rows", "columns", "checks", "rings")
SIDE = 32  # pixels


def draw(count: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Images uint8 [count, 32, 32] and their labels [count]."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, len(PATTERNS), count)
    frequency = random.uniform(0.7, 1.4, (count, 1, 1))
    down, right = (np.arange(SIDE) - random.uniform(4, SIDE - 4, (count, 1)) for _ in range(2))  # from a centre
    y, x = frequency * down[:, :, np.newaxis], frequency * right[:, np.newaxis, :]
    kinds = [np.sin(y + 0 * x), np.sin(x + 0 * y), np.sin(x) * np.sin(y), np.cos(np.hypot(x, y))]
    pattern = np.choose(labels[:, np.newaxis, np.newaxis], kinds)
    noisy = 128 + 60 * pattern + random.normal(0, 40, pattern.shape)
    return noisy.clip(0, 255).astype(np.uint8), labels


def load() -> hvd_cifar.Dataset:
    """6,000 images to learn from, and 1,000 to evaluate on."""
    train_images, train_labels = draw(6000, seed=1)
    test_images, test_labels = draw(1000, seed=2)
    return hvd_cifar.Dataset.from_arrays(
        train_images, train_labels, test_images, test_labels, name="patterns", class_names=PATTERNS
    )
