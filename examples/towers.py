"""The tower tutorial's net with its plain gradient descent, for batches of any size:

./run.sh -np 2 train --model examples/towers.py:build --set learning_rate_factor=1
"""

import keras

from hvd_cifar import Recipe
from hvd_cifar.models import tutorial


def build(image_shape: tuple[int, int, int], classes: int) -> tuple[keras.Model, Recipe]:
    """As `--num_gpus=2` of the tutorial: 128 images of each rank, and the rate 0.1, which is not scaled."""
    return tutorial.build(image_shape, classes), tutorial.PUBLISHED
